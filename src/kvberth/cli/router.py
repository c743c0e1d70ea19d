"""`kvberth router`: the router alone, in front of engines that run elsewhere."""

import logging
import ssl
from pathlib import Path
from typing import Annotated

import typer

from kvberth.cli.errors import BadSettings, RunFailed
from kvberth.cli.options import Binding, Config, DecodePolicy, Mode, PrefillPolicy

__all__ = ["router"]


def router(
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="An engine, which says itself whether it prefills or decodes. Repeatable."),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="An engine that must be a prefill worker. Repeatable."),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="An engine that must be a decode worker. Repeatable."),
    ] = None,
    engines_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One engine's URL per line; read again on SIGHUP.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Who moves the KV cache: prefill pushes, or decode pulls.")] = Mode.PUSH,
    binding: Annotated[
        Binding,
        typer.Option(
            help="When the decode worker of a push is chosen: before, shortly before or after prefill; auto decides by "
            "request."
        ),
    ] = Binding.AUTO,
    config: Config = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where to listen.")] = 8000,
    admin_host: Annotated[str, typer.Option(help="Where the admin API listens.")] = "127.0.0.1",
    admin_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Where engines are added and removed; nowhere if not given."),
    ] = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="KVBERTH_ADMIN_API_KEY",
            help="Opens the admin API, and what it shows at the clients' port, to all who have it. Without one, both "
            "are for this machine only.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A further name under which page and admin API are served on the loopback address. Repeatable.",
        ),
    ] = None,
    connect_timeout_seconds: Annotated[float, typer.Option(help="Longest wait for an engine's connection.")] = 5.0,
    first_token_timeout_seconds: Annotated[float, typer.Option(help="Longest wait for a leg's first token.")] = 300.0,
    total_timeout_seconds: Annotated[
        float | None, typer.Option(help="Longest time for a whole request; unbounded if not given.")
    ] = None,
    health_interval_seconds: Annotated[float, typer.Option(help="Time between looks at each engine.")] = 1.0,
    prefill_policy: Annotated[
        PrefillPolicy, typer.Option(help="How a prefill worker is chosen.")
    ] = PrefillPolicy.QUEUE,
    decode_policy: Annotated[DecodePolicy, typer.Option(help="How a decode worker is chosen.")] = DecodePolicy.FREE_KV,
    affinity_seconds: Annotated[
        float, typer.Option(help="How much longer a queue may be where the prompt's beginning was seen before.")
    ] = 0.5,
    local_prefill_tokens: Annotated[
        int, typer.Option(help="A decode worker that lacks fewer of a prompt computes them itself; 0 is never.")
    ] = 0,
    max_retries: Annotated[
        int, typer.Option(help="Failures of decode workers that one request may have hidden from its client.")
    ] = 2,
    continue_streams: Annotated[
        bool, typer.Option(help="Whether streams go on at another decode worker when theirs goes away.")
    ] = True,
    client_stall_seconds: Annotated[
        float, typer.Option(help="Longest wait for a client that neither reads its answer nor sends its request.")
    ] = 60.0,
    max_in_flight: Annotated[int, typer.Option(help="Requests at once; more wait, or are answered with 429.")] = 2048,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait while max-in-flight is reached.")] = 0,
    queue_timeout_seconds: Annotated[float, typer.Option(help="Longest such wait; then 429.")] = 30.0,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = 32 * 1024 * 1024,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="KVBERTH_ROUTER_API_KEY",
            help="A key that clients must have. Repeatable; several in the environment are separated by spaces.",
        ),
    ] = None,
    engine_api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="KVBERTH_ENGINE_API_KEY", help="The key that is sent to engines."),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Certificate to serve https with.")
    ] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Its private key.")] = None,
    engine_ca_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="What certificates of https engines must go back to."),
    ] = None,
    engine_insecure: Annotated[
        bool, typer.Option("--engine-insecure", help="Do not check certificates of https engines.")
    ] = False,
    control_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The router's secret key on control channels ('kvberth keys new')."),
    ] = None,
    control_peers_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The public keys of prefill workers that have one.")
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            help="Collector of OpenTelemetry traces, as for vLLM; none, no traces.",
        ),
    ] = None,
) -> None:
    """Serve one OpenAI-compatible address in front of prefill and decode workers."""
    from kvberth.keys import KeyFileError  # noqa: PLC0415
    from kvberth.router import Mode as RouterMode  # noqa: PLC0415
    from kvberth.router import RouterConfig, serve  # noqa: PLC0415
    from kvberth.router.binding import Binding as RouterBinding  # noqa: PLC0415
    from kvberth.router.choice import DecodePolicy as RouterDecodePolicy  # noqa: PLC0415
    from kvberth.router.choice import PrefillPolicy as RouterPrefillPolicy  # noqa: PLC0415
    from kvberth.router.engines_file import EnginesFileError  # noqa: PLC0415
    from kvberth.router.tracing import TracingError  # noqa: PLC0415

    del config  # its callback has used it
    try:
        settings = RouterConfig(
            engines=tuple(engine or ()),
            prefill=tuple(prefill or ()),
            decode=tuple(decode or ()),
            engines_file=str(engines_file) if engines_file is not None else None,
            host=host,
            port=port,
            admin_host=admin_host,
            admin_port=admin_port,
            admin_api_key=admin_api_key,
            allowed_host=tuple(allowed_host or ()),
            mode=RouterMode(mode),
            binding=RouterBinding(binding),
            connect_timeout_seconds=connect_timeout_seconds,
            first_token_timeout_seconds=first_token_timeout_seconds,
            total_timeout_seconds=total_timeout_seconds,
            health_interval_seconds=health_interval_seconds,
            prefill_policy=RouterPrefillPolicy(prefill_policy),
            decode_policy=RouterDecodePolicy(decode_policy),
            affinity_seconds=affinity_seconds,
            local_prefill_tokens=local_prefill_tokens,
            max_retries=max_retries,
            continue_streams=continue_streams,
            client_stall_seconds=client_stall_seconds,
            max_in_flight=max_in_flight,
            max_queue=max_queue,
            queue_timeout_seconds=queue_timeout_seconds,
            max_body_bytes=max_body_bytes,
            api_key=tuple(api_key or ()),
            engine_api_key=engine_api_key,
            ssl_certfile=_text(ssl_certfile),
            ssl_keyfile=_text(ssl_keyfile),
            engine_ca_file=_text(engine_ca_file),
            engine_insecure=engine_insecure,
            control_key_file=_text(control_key_file),
            control_peers_dir=_text(control_peers_dir),
            otlp_traces_endpoint=otlp_traces_endpoint,
        )
    except ValueError as error:
        raise BadSettings(str(error)) from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        serve(settings)
    except (EnginesFileError, KeyFileError, TracingError) as error:
        raise BadSettings(str(error)) from error
    except ssl.SSLError as error:
        raise BadSettings(f"a certificate or key cannot be used: {error}") from error
    except SystemExit as end:  # the server has logged why, and ends with a status of its own
        raise RunFailed(f"the router could not start on {host}:{port}; the log above says why") from end


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
