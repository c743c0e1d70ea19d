"""`python -m kvberth`: the same command where its script is not on the path, as in the processes that `up` starts."""

from kvberth.cli import main

if __name__ == "__main__":
    main()
