"""`kvberth up`: a local cluster in the foreground."""

import json
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from kvberth.cli.errors import BadSettings, RunFailed
from kvberth.cli.options import Config, ConnectorChoice, Mode

__all__ = ["up"]


def up(
    model: Annotated[str | None, typer.Option(help="Name or folder of the model, as for vLLM.")] = None,
    emulate: Annotated[
        str | None, typer.Option(help="In place of a model: a profile of the emulated accelerator, or its .toml file.")
    ] = None,
    emulate_link: Annotated[
        bool, typer.Option("--emulate-link", help="Emulated transfers take the true bytes' time on the profile's link.")
    ] = False,
    prefill: Annotated[int, typer.Option(help="Number of prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(help="Number of decode workers.")] = 1,
    undivided: Annotated[int, typer.Option(help="Number of engines beside them that do both, without router.")] = 0,
    mode: Annotated[Mode, typer.Option(help="Who moves the KV cache: prefill pushes, or decode pulls.")] = Mode.PUSH,
    connector: Annotated[
        ConnectorChoice, typer.Option(help="Ours, or vLLM's own over NIXL (emulated engines only).")
    ] = ConnectorChoice.KVBERTH,
    config: Config = None,
    host: Annotated[str, typer.Option(help="Where router and engines listen.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port of the router; a free one if not given.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As for vLLM, such as float32.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest context in tokens, as for vLLM.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block, as for vLLM.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for logs; a temporary one if not given.")] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="One argument for every engine, such as --engine-arg=--max-num-seqs=8. Repeatable."),
    ] = None,
    prefill_arg: Annotated[
        list[str] | None, typer.Option(help="One more argument for every prefill worker. Repeatable.")
    ] = None,
    decode_arg: Annotated[
        list[str] | None, typer.Option(help="One more argument for every decode worker. Repeatable.")
    ] = None,
    router_arg: Annotated[
        list[str] | None, typer.Option(help="One more argument for the router, as for kvberth router. Repeatable.")
    ] = None,
) -> None:
    """Start prefill workers, decode workers and a router on this machine; Ctrl-C stops them all."""
    from kvberth.launch import ClusterSettings, Connector, LaunchError, LocalCluster  # noqa: PLC0415

    del config  # its callback has used it
    model = _model_or_profile(model, emulate)
    if emulate is None and model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        # vLLM would say so too, but after half a minute and as the name of a repository.
        raise BadSettings(f"model: there is no folder {model}")
    try:
        settings = ClusterSettings(
            model=model,
            emulate=emulate is not None,
            emulate_link=emulate_link,
            prefill=prefill,
            decode=decode,
            undivided=undivided,
            mode=mode,
            connector=Connector(connector),
            host=host,
            port=port,
            served_model_name=served_model_name,
            dtype=dtype,
            max_model_len=max_model_len,
            block_size=block_size,
            engine_args=tuple(engine_arg or ()),
            prefill_args=tuple(prefill_arg or ()),
            decode_args=tuple(decode_arg or ()),
            router_args=tuple(router_arg or ()),
            run_dir=run_dir,
        )
    except ValueError as error:
        raise BadSettings(str(error)) from error
    try:
        with _one_signal_interrupts(), LocalCluster(settings, Console(stderr=True)) as cluster:
            urls = [engine.url for engine in cluster.undivided]
            if cluster.router is not None:
                urls = [cluster.router_url, *urls]
                typer.echo(f"router  {cluster.router_url}")
            for engine in cluster.undivided:
                typer.echo(f"engine  {engine.url}")
            typer.echo(f"logs    {cluster.run_dir}")
            typer.echo(f"try     {example(urls[0], settings.model_name)}")
            typer.echo("Ctrl-C stops everything.", err=True)
            cluster.wait()
    except KeyboardInterrupt:
        typer.echo("Everything has been stopped.", err=True)
    except (LaunchError, OSError) as error:
        raise RunFailed(str(error)) from error


def _model_or_profile(model: str | None, profile: str | None) -> str:
    """What the engines are to serve, checked as far as it can be without them."""
    from kvberth.emulator import EmulatorError, load_profile  # noqa: PLC0415

    if profile is None:
        if model is None:
            raise BadSettings("model: give --model, or --emulate for an emulated engine")
        return model
    if model is not None:
        raise BadSettings("model: give either --model or --emulate, not both")
    try:
        load_profile(profile)
    except EmulatorError as error:
        raise BadSettings(f"emulate: {error}") from error
    return profile


def example(router_url: str, model: str) -> str:
    """A request to paste into a shell."""
    body = json.dumps({"model": model, "prompt": "A berth is a place where a ship", "max_tokens": 16})
    return f"curl {router_url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"


@contextmanager
def _one_signal_interrupts() -> Iterator[None]:
    """SIGINT and SIGTERM both raise KeyboardInterrupt, once: a second one must not cut the stopping short.

    The stopping is bounded in time by the cluster itself.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
