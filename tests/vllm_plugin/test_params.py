"""`kv_transfer_params` and the connector's settings: what users and routers may write."""

import pytest

from kvberth.keys import PeerRole, make_key_pair, write_key_pair
from kvberth.protocol import TransferKey, TransferMode

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvberth.vllm_plugin.params import ParamsError, TransferParams, external_request_id, prompt_digest
from kvberth.vllm_plugin.settings import ConnectorSettings, SettingsError, is_loopback


def test_what_vllm_s_own_connector_sends_is_understood():
    """A sequential router that knows nothing of kvberth: P's answer goes to D as it is, with fields that we ignore."""
    params = TransferParams.parse({
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "P",
        "remote_host": "10.0.0.1",
        "remote_port": 14579,
        "remote_request_id": "cmpl-1-0-aabbccdd",
        "remote_block_ids": [[1, 2]],
        "tp_size": 1,
        "dcp_size": 1,
    })  # fmt: skip
    assert params.key("cmpl-other") == TransferKey("1")


def test_what_vllm_router_sends_to_the_prefill_worker_is_understood():
    """The remote fields are null there."""
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    params = TransferParams.parse({"do_remote_decode": True, "do_remote_prefill": False, **nulls})
    assert params.keys("cmpl-7-0-00112233") == (TransferKey("7"),)


def test_without_a_transfer_id_both_legs_share_the_request_id():
    """A concurrent router that sends one `X-Request-Id` to both."""
    producer = TransferParams.parse({"do_remote_decode": True})
    consumer = TransferParams.parse({"do_remote_prefill": True, "remote_host": "h", "remote_port": 1})
    assert producer.keys("cmpl-7-0-00112233") == (consumer.key("cmpl-7-0-ffeeddcc"),)


def test_what_vllm_router_sends_in_push_ties_the_legs_together():
    """It names the bare `X-Request-Id` to the decode worker."""
    producer = TransferParams.parse({"do_remote_decode": True})
    remote = {"remote_engine_id": "P", "remote_host": "h", "remote_port": 1, "tp_size": 1, "remote_request_id": "rid-1"}
    consumer = TransferParams.parse({"do_remote_prefill": True, **remote})
    assert producer.keys("cmpl-rid-1-0-00112233") == (consumer.key("cmpl-rid-1-0-ffeeddcc"),)
    assert producer.keys("chatcmpl-rid-1-00112233") == (consumer.key("chatcmpl-rid-1-ffeeddcc"),)


def test_several_choices_have_a_transfer_each():
    """With n = 3, vLLM's children are told apart by their prefix."""
    params = TransferParams.parse({"do_remote_decode": True, "transfer_id": "t", "num_consumers": 3})
    assert params.keys("cmpl-7") == (TransferKey("t", 0), TransferKey("t", 1), TransferKey("t", 2))
    assert params.key("2_cmpl-7-0-00112233") == TransferKey("t", 2)


def test_a_single_choice_is_never_taken_for_a_child():
    """A request id that a client made up may begin like a child's."""
    params = TransferParams.parse({"do_remote_decode": True, "transfer_id": "t"})
    assert params.key("2_my-own-id") == TransferKey("t", 0)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"attempt": -1}, "attempt must be 0 or more, not -1"),
        ({"num_consumers": 0}, "num_consumers must be 1 to 1024, not 0"),
        ({"num_consumers": 5000}, "num_consumers must be 1 to 1024, not 5000"),
        ({"transfer_mode": "shove"}, r"Invalid enum value 'shove' - at `\$.transfer_mode`"),
        ({"do_remote_prefill": True}, "needs remote_host and remote_port"),
        ({"transfer_id": 5}, r"Expected `str \| null`, got `int` - at `\$.transfer_id`"),
    ],
)
def test_bad_parameters_are_named(params, text):
    """The error says which field and what would be right."""
    with pytest.raises(ParamsError, match=text):
        TransferParams.parse(params)


@pytest.mark.parametrize(
    ("request_id", "external"),
    [
        ("cmpl-a-0-0123abcd", "a"),
        ("chatcmpl-x-0123abcd", "x"),
        ("cmpl-req-7-0-0123abcd", "req-7"),
        ("my-id", "my-id"),
        ("req-7", "req-7"),
        ("a-0123abcd", "a-0123abcd"),
        ("chatcmpl-x-0123ABCD", "chatcmpl-x-0123ABCD"),
    ],
)
def test_external_id_drops_only_vllm_s_suffix(request_id, external):
    """Endpoint, position and eight lower-case hexadecimal digits; what looks different is not vLLM's."""
    assert external_request_id(request_id) == external


def test_digest_depends_on_all_that_the_kv_depends_on():
    """Tokens, their order, the adapter, the images."""
    digests = {
        prompt_digest([1, 2, 3]),
        prompt_digest([3, 2, 1]),
        prompt_digest([1, 2, 3], "adapter"),
        prompt_digest([1, 2, 3], "", "adapter"),
        prompt_digest([1, 2]),
    }
    assert len(digests) == 5
    assert prompt_digest([1, 2, 3]) == prompt_digest([1, 2, 3])
    assert len(prompt_digest([])) == 16


def test_settings_have_defaults():
    """Nothing needs to be set."""
    settings = ConnectorSettings.from_extra_config({})
    assert settings.transfer_mode is TransferMode.PUSH
    assert settings.timing.lease_seconds == 30.0


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"transfer_mod": "push"}, "unknown field `transfer_mod`; the settings are transfer_mode, control_host"),
        ({"transfer_mode": "both"}, "Invalid enum value 'both'"),
        ({"lease_seconds": 0}, "lease_seconds must be above 0"),
        ({"deadline_seconds": "soon"}, "Expected `float`, got `str`"),
        ({"control_key_file": "k"}, "control_key_file and control_peers_dir need each other"),
        ({"control_peers_dir": "k"}, "control_key_file and control_peers_dir need each other"),
        ({"control_advertised": "gateway"}, "control_advertised must be HOST:PORT, not 'gateway'"),
        ({"control_advertised": ":7000"}, "control_advertised must be HOST:PORT"),
        ({"control_advertised": "gateway:70000"}, "control_advertised must be HOST:PORT"),
    ],
)
def test_bad_settings_are_named(config, text):
    """A typing error does not become a default."""
    with pytest.raises(SettingsError, match=text):
        ConnectorSettings.from_extra_config(config)


@pytest.mark.parametrize(
    ("config", "dialled"),
    [
        ({}, ("127.0.0.1", 5000)),
        ({"control_host": "10.0.0.4"}, ("10.0.0.4", 5000)),
        ({"control_host": "10.0.0.4", "control_advertised": "gateway:7000"}, ("gateway", 7000)),
        ({"control_advertised": "::1:7000"}, ("::1", 7000)),
    ],
)
def test_others_dial_what_is_advertised(config, dialled):
    """Or else what is listened on: here port 5000."""
    assert ConnectorSettings.from_extra_config(config).dialled_at(5000) == dialled


@pytest.mark.parametrize(
    ("host", "answer"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("node-7", False)]
)
def test_loopback(host, answer):
    """Anything else needs keys."""
    assert is_loopback(host) is answer


KEYS = {"control_key_file": "/nowhere/P.key_secret", "control_peers_dir": "/nowhere"}


@pytest.mark.parametrize(
    ("config", "is_fine"),
    [
        ({}, True),
        ({"control_host": "10.0.0.4"}, False),
        ({"control_host": "0.0.0.0"}, False),
        ({"control_host": "10.0.0.4", **KEYS}, True),
        ({"control_host": "10.0.0.4", "allow_unauthenticated": True}, True),
    ],
)
def test_an_open_control_channel_must_be_meant(config, is_fine):
    """Beyond the loopback address it has keys, or somebody has said that it needs none."""
    settings = ConnectorSettings.from_extra_config(config)
    if is_fine:
        settings.check_listening()
    else:
        with pytest.raises(SettingsError, match=r"kvberth keys new.*allow_unauthenticated to true"):
            settings.check_listening()


def test_keys_are_read_from_their_files(tmp_path):
    """Ours, and those of accepted peers; without the settings there are none."""
    pair = make_key_pair("P", PeerRole.ENGINE)
    write_key_pair(pair, tmp_path)
    config = {"control_key_file": str(tmp_path / "P.key_secret"), "control_peers_dir": str(tmp_path)}
    keyring = ConnectorSettings.from_extra_config(config).keyring()
    assert keyring is not None
    assert (keyring.own, keyring.find("P")) == (pair, pair.certificate)
    assert ConnectorSettings.from_extra_config({}).keyring() is None


def test_keys_that_cannot_be_used_are_an_error_at_start():
    """Which names the file."""
    with pytest.raises(SettingsError, match=r"kv_connector_extra_config: /nowhere/P.key_secret: no such file"):
        ConnectorSettings.from_extra_config(KEYS).keyring()


@pytest.mark.parametrize(
    ("named", "identity"),
    [
        ({"remote_public_key": "k", "remote_engine_id": "e"}, "k"),
        ({"remote_engine_id": "e"}, "e"),
        ({"remote_public_key": "", "remote_engine_id": "e"}, "e"),
        ({}, ""),
    ],
)
def test_the_prefill_worker_s_identity_is_its_key_or_else_its_name(named, identity):
    """Routers that know nothing of keys name the engine."""
    assert TransferParams.parse(named).producer_identity == identity
