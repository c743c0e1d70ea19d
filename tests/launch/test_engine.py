"""Command lines and environments of engines, and the settings that they come from."""

import json
import sys
from pathlib import Path

import pytest

from kvberth import emulator
from kvberth.emulator.settings import EmulatorSettings
from kvberth.launch import ClusterSettings, Connector, engine
from kvberth.launch.engine import EngineKind, Hardware, engine_command, engine_environment

CPU = Hardware(gpus=(), num_cores=2)


def transfer_config(command: list[str]) -> dict:
    return json.loads(command[command.index("--kv-transfer-config") + 1])


def test_prefill_worker_s_command():
    """Role, control channel and mode are in the transfer configuration."""
    settings = ClusterSettings(model="m", mode="pull", dtype="float32", block_size=32, engine_args=("--enforce-eager",))
    command = engine_command(EngineKind.PREFILL, settings, port=8001, control_port=9001)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert command[-1] == "--enforce-eager"
    assert command[command.index("--port") + 1] == "8001"
    assert command[command.index("--dtype") + 1] == "float32"
    assert command[command.index("--block-size") + 1] == "32"
    assert transfer_config(command) == {
        "kv_connector": "KVBerthConnector",
        "kv_connector_module_path": "kvberth.vllm_plugin",
        "kv_role": "kv_producer",
        "kv_port": 9001,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"control_host": "127.0.0.1", "transfer_mode": "pull"},
    }


def test_keys_are_named_by_their_files():
    """The secrets themselves are on no command line."""
    key_file = Path("/keys/prefill-0.key_secret")
    command = engine_command(EngineKind.PREFILL, ClusterSettings(model="m"), port=1, control_port=2, key_file=key_file)
    assert "engine_id" not in transfer_config(command)
    config = transfer_config(command)["kv_connector_extra_config"]
    assert (config["control_key_file"], config["control_peers_dir"]) == (str(key_file), "/keys")


def test_an_engine_s_id_may_be_the_name_of_its_key():
    """Routers that pass no key on pass the id on, by which the key is found."""
    settings = ClusterSettings(model="m", name_engines=True)
    key_file = Path("/keys/prefill-0.key_secret")
    command = engine_command(EngineKind.PREFILL, settings, port=1, control_port=2, key_file=key_file)
    assert transfer_config(command)["engine_id"] == "prefill-0"


def test_decode_worker_is_a_consumer():
    """And recomputes what does not come."""
    config = transfer_config(engine_command(EngineKind.DECODE, ClusterSettings(model="m"), port=1, control_port=0))
    assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_consumer", "recompute")


def test_undivided_engine_has_no_connector():
    """It is the yardstick."""
    command = engine_command(EngineKind.UNDIVIDED, ClusterSettings(model="m", undivided=1), port=1, control_port=0)
    assert "--kv-transfer-config" not in command


@pytest.mark.parametrize(
    ("value", "flag"), [(True, "--enable-prefix-caching"), (False, "--no-enable-prefix-caching"), (None, None)]
)
def test_prefix_caching_is_vllm_s_own_unless_said(value, flag):
    """None leaves vLLM's default."""
    command = engine_command(
        EngineKind.DECODE, ClusterSettings(model="m", prefix_caching=value), port=1, control_port=0
    )
    assert [part for part in command if "prefix-caching" in part] == ([flag] if flag else [])


def test_processor_s_cores_are_shared():
    """Three engines on two cores have one thread each; what the user has set stays."""
    env = engine_environment(ClusterSettings(model="m"), CPU, {"OMP_NUM_THREADS": "7"}, num_engines=3, position=0)
    assert env["OMP_NUM_THREADS"] == "7"
    env = engine_environment(ClusterSettings(model="m"), CPU, {}, num_engines=3, position=0)
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in env


@pytest.mark.parametrize(
    ("gpus", "num_engines", "devices"),
    [
        ("01234567", 2, ["0,1,2,3", "4,5,6,7"]),
        ("01", 2, ["0", "1"]),
        ("4567", 3, ["4", "5", "6"]),
        ("0", 2, ["0", "0"]),
    ],
)
def test_gpus_are_dealt_out(gpus, num_engines, devices):
    """Each engine gets its own as long as there are enough, of those that this process may use."""
    hardware = Hardware(gpus=tuple(gpus), num_cores=64)
    settings = ClusterSettings(model="m")
    base = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    environments = [
        engine_environment(settings, hardware, base, num_engines=num_engines, position=position)
        for position in range(num_engines)
    ]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == devices
    assert all("OMP_NUM_THREADS" not in env for env in environments)


@pytest.mark.parametrize(
    ("visible", "gpus"), [("2,3", ("2", "3")), ("GPU-a,GPU-b", ("GPU-a", "GPU-b")), ("", ()), ("-1", ())]
)
def test_only_visible_gpus_are_used(monkeypatch, visible, gpus):
    """A job scheduler may have left us a part of the machine; and a vLLM for processors uses none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(engine, "_has_cpu_build", lambda: False)
    assert Hardware.detect().gpus == gpus
    monkeypatch.setattr(engine, "_has_cpu_build", lambda: True)
    assert Hardware.detect().gpus == ()


@pytest.mark.parametrize(("gpus", "num_engines", "shares"), [("0", 2, ["0.45"]), ("01", 3, ["0.45"]), ("01", 2, [])])
def test_engines_on_one_gpu_share_its_memory(gpus, num_engines, shares):
    """And the user has the last word."""
    per_gpu = Hardware(gpus=tuple(gpus), num_cores=64).engines_per_gpu(num_engines)
    settings = ClusterSettings(model="m", engine_args=("--gpu-memory-utilization", "0.2"))
    command = engine_command(EngineKind.DECODE, settings, port=1, control_port=0, engines_per_gpu=per_gpu)
    given = [command[at + 1] for at, part in enumerate(command) if part == "--gpu-memory-utilization"]
    assert given == [*shares, "0.2"]


def test_local_model_asks_no_hub(tmp_path):
    """A folder is complete; a name may have to be fetched."""
    local = engine_environment(ClusterSettings(model=str(tmp_path)), CPU, {}, num_engines=1, position=0)
    named = engine_environment(ClusterSettings(model="org/model"), CPU, {}, num_engines=1, position=0)
    assert local["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in named


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": ""}, "model: must be a name or a folder"),
        ({"prefill": -1}, "prefill: must be 0 or more, not -1"),
        ({"decode": 0}, "decode: must be 1 or more beside 1 prefill workers, not 0"),
        ({"prefill": 0, "decode": 0}, "decode: must be 1 or more, not 0"),
        ({"mode": "shove"}, "mode: must be push or pull, not shove"),
        ({"port": 70000}, "port: must be 1 to 65535, not 70000"),
        ({"block_size": 0}, "block_size: must be 1 or more, not 0"),
        (
            {"connector": Connector.VLLM},
            "connector: vllm is for emulated engines; the router cannot find real ones that have it",
        ),
        ({"emulate_link": True}, "emulate_link: there is no link to emulate without emulated engines"),
    ],
)
def test_impossible_settings_are_named(changes, text):
    """One line that says what would be right."""
    with pytest.raises(ValueError, match=f"^{text}$"):
        ClusterSettings(**{"model": "m", **changes})


# Emulated engines.


def options(command: list[str], flag: str) -> list[str]:
    """All values that a flag is given."""
    return [command[at + 1] for at, part in enumerate(command) if part == flag]


def emulated(**changes: object) -> ClusterSettings:
    return ClusterSettings(**{"model": "small", "emulate": True, **changes})


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("connector", list(Connector))
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_emulated_engines_may_have_all_of_it(link, connector, mode):
    """Either connector in either mode, with the link or without."""
    settings = emulated(emulate_link=link, connector=connector, mode=mode)
    assert (settings.emulate_link, settings.connector, settings.mode) == (link, connector, mode)


@pytest.mark.parametrize("kind", list(EngineKind))
def test_emulated_engine_s_command(kind):
    """A profile where a model would be, and the same connector as on any engine."""
    real = engine_command(kind, ClusterSettings(model="small"), port=1, control_port=2)
    assert options(real, "--served-model-name") == []
    command = engine_command(kind, emulated(), port=1, control_port=2)
    at = command.index("--served-model-name")
    assert command[at + 1] == "small"
    assert command[:at] + command[at + 2 :] == real


@pytest.mark.parametrize(
    ("model", "name"), [("small", "small"), ("/profiles/mine.toml", "mine"), ("qwen3-32b-8xh200", "qwen3-32b-8xh200")]
)
def test_clients_call_a_profile_by_its_name(model, name):
    """Not by the folder that stands for the model; a name that was asked for comes before it."""
    assert options(engine_command(EngineKind.DECODE, emulated(model=model), port=1, control_port=0), "--model") == [
        model
    ]
    for served, expected in ((None, name), ("s", "s")):
        settings = emulated(model=model, served_model_name=served)
        command = engine_command(EngineKind.DECODE, settings, port=1, control_port=0)
        assert options(command, "--served-model-name") == [expected]


def test_a_dot_in_a_profile_s_name_is_no_suffix():
    """Every profile that comes with kvberth is called by its name."""
    for name in emulator.profile_names():
        command = engine_command(EngineKind.DECODE, emulated(model=name), port=1, control_port=0)
        assert options(command, "--served-model-name") == [name]


@pytest.mark.parametrize("link", [True, False])
def test_the_link_is_a_setting_of_the_emulator(link):
    """Nothing is said where nothing was asked for."""
    command = engine_command(EngineKind.DECODE, emulated(emulate_link=link), port=1, control_port=0)
    configs = [json.loads(value) for value in options(command, "--additional-config")]
    assert configs == ([{"kvberth_emulator": {"link": True}}] if link else [])
    assert all(EmulatorSettings.of(config).link for config in configs)


@pytest.mark.parametrize(("mode", "connector"), [("push", "NixlPushConnector"), ("pull", "NixlConnector")])
@pytest.mark.parametrize(("kind", "role"), [(EngineKind.PREFILL, "kv_producer"), (EngineKind.DECODE, "kv_consumer")])
def test_vllm_s_own_connectors(mode, connector, kind, role):
    """By their names, without anything of ours."""
    settings = emulated(connector=Connector.VLLM, mode=mode)
    assert transfer_config(engine_command(kind, settings, port=1, control_port=2)) == {
        "kv_connector": connector,
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {},
    }


@pytest.mark.parametrize(
    ("connector", "own"),
    [(Connector.KVBERTH, {"control_host": "127.0.0.1", "transfer_mode": "push"}), (Connector.VLLM, {})],
)
def test_a_connector_s_further_settings_reach_it(connector, own):
    """Beside what the launcher says itself; the user has the last word."""
    for further in ({"num_threads": 4, "backends": ["UCX"]}, {"transfer_mode": "pull"}):
        settings = emulated(connector=connector, connector_config=further)
        config = transfer_config(engine_command(EngineKind.PREFILL, settings, port=1, control_port=2))
        assert config["kv_connector_extra_config"] == {**own, **further}


def test_undivided_emulated_engine_has_no_connector():
    """Whatever the others have."""
    settings = emulated(connector=Connector.VLLM, undivided=1)
    assert "--kv-transfer-config" not in engine_command(EngineKind.UNDIVIDED, settings, port=1, control_port=0)


@pytest.mark.parametrize("gpus", ["", "01"])
def test_emulated_engine_s_environment(gpus):
    """The switch is on; GPUs are not dealt out, and nothing of the processor's own platform is set."""
    hardware = Hardware(gpus=tuple(gpus), num_cores=2)
    base = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "01", emulator.SWITCH: "0"}
    env = engine_environment(emulated(), hardware, base, num_engines=3, position=1, control_port=5)
    assert env == {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "01",
        emulator.SWITCH: "1",
    }


def test_real_engines_are_not_emulated():
    """The switch is not set for them."""
    env = engine_environment(ClusterSettings(model="m"), CPU, {}, num_engines=1, position=0, control_port=5)
    assert emulator.SWITCH not in env
    assert not [name for name in env if "SIDE_CHANNEL" in name]


def test_vllm_s_connectors_get_their_control_channel_by_the_environment():
    """Each engine its own port, whatever the user's own environment says: two on one port would not start."""
    settings = emulated(connector=Connector.VLLM, host="10.0.0.1")
    base = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "elsewhere", "VLLM_NIXL_SIDE_CHANNEL_PORT": "1"}
    env = engine_environment(settings, CPU, base, num_engines=2, position=0, control_port=9001)
    assert (env["VLLM_NIXL_SIDE_CHANNEL_HOST"], env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("10.0.0.1", "9001")
    assert env[emulator.SWITCH] == "1"
    assert base["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "1"
