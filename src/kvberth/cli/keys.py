"""`kvberth keys`: the keys with which engines and routers prove who they are on the control channel."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvberth.cli.errors import BadSettings, RunFailed
from kvberth.cli.options import Json, PeerRole

if TYPE_CHECKING:
    from kvberth.keys import Certificate

__all__ = ["keys"]

keys = typer.Typer(
    help="Make and show the keys with which engines and routers prove who they are.", rich_markup_mode=None
)

Dir = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where the files are.")]


@keys.command()
def new(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="One per engine or router, such as prefill-0.")],
    role: Annotated[PeerRole, typer.Option(help="What all of them are.")] = PeerRole.ENGINE,
    directory: Dir = Path("keys"),
) -> None:
    """Make a key pair per name: NAME.key for all who shall accept it, NAME.key_secret for NAME alone."""
    from kvberth.keys import KeyFileError, make_key_pair, write_key_pair  # noqa: PLC0415
    from kvberth.keys import PeerRole as KeyRole  # noqa: PLC0415

    try:
        pairs = [make_key_pair(name, KeyRole(role)) for name in names]
    except KeyFileError as error:
        raise BadSettings(str(error)) from error
    try:
        for pair in pairs:
            public, secret = write_key_pair(pair, directory)
            typer.echo(f"{pair.certificate.name}  public {public}  secret {secret}")
    except KeyFileError as error:
        raise RunFailed(str(error)) from error


@keys.command("list")
def list_keys(directory: Dir = Path("keys"), as_json: Json = False) -> None:
    """Show the keys in a directory: name, role, public key, and whether the secret one is there too.

    Exit status 1 if a file cannot be used.
    """
    from kvberth.keys import KeyFileError, read_certificate, read_key_pair  # noqa: PLC0415
    from kvberth.keys.files import PUBLIC_SUFFIX, SECRET_SUFFIX  # noqa: PLC0415

    if not directory.is_dir():
        raise BadSettings(f"dir: there is no directory {directory}")
    found: dict[str, tuple[Certificate, bool]] = {}
    problems = []
    for path in sorted(directory.iterdir()):
        try:
            if path.name.endswith(SECRET_SUFFIX):
                certificate = read_key_pair(path).certificate
                _check_same(found.get(certificate.name), certificate, path)
                found[certificate.name] = (certificate, True)
            elif path.name.endswith(PUBLIC_SUFFIX):
                certificate = read_certificate(path)
                found[certificate.name] = (certificate, False)
        except KeyFileError as error:
            problems.append(str(error))
    if as_json:
        rows = [
            {"name": each.name, "role": each.role, "public_key": each.public_key, "has_secret": has_secret}
            for each, has_secret in found.values()
        ]
        typer.echo(json.dumps({"keys": rows, "problems": problems}))
    else:
        width = max((len(name) for name in found), default=0)
        for each, has_secret in found.values():
            typer.echo(f"{each.name:<{width}}  {each.role:<6}  {each.public_key}{'  with secret' * has_secret}")
    if problems:
        raise RunFailed("; ".join(problems))


def _check_same(public: "tuple[Certificate, bool] | None", own: "Certificate", path: Path) -> None:
    from kvberth.keys import KeyFileError  # noqa: PLC0415

    if public is not None and public[0] != own:
        raise KeyFileError(f"{path} is not the secret half of {own.name}.key beside it; others accept another key")
