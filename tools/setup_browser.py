"""Install the browser that the tests of the router's page run in: Debian's Chromium. `make check` calls this first.

Nothing happens where there is one, and nothing fails where none can be had: those tests are skipped then, and say why.
Only root may install packages, and only a system with apt has this one; on others a person decides.
"""

import os
import shutil
import sys

from setup_env import LOG, SetupError, run

NAMES = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    if any(map(shutil.which, NAMES)):
        return 0
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print("No Chromium here: the tests of the router's page in a browser are skipped.")
        return 0
    LOG.parent.mkdir(exist_ok=True)
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    try:
        run("Debian's list of packages", ["apt-get", "update"])
        install = ["apt-get", "install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
        run("Chromium, for the tests of the router's page", install)
    except SetupError as error:
        print(f"{error}\nWithout Chromium the tests of the router's page in a browser are skipped.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
