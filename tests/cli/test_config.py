"""Where settings come from: file, environment, flags, in rising order; and what a file may say."""

import pytest

UP = "[up]\nmodel = 'from-file'\nprefill = 2\nblock_size = 16\n"


def test_a_file_gives_settings(kvberth_command, cluster, settings_file):
    """A required option may come from the file too."""
    assert kvberth_command("up", "--config", settings_file(UP)).exit_code == 0
    assert (cluster.settings.model, cluster.settings.prefill, cluster.settings.block_size) == ("from-file", 2, 16)


def test_environment_overrides_file(kvberth_command, cluster, settings_file):
    """Setting by setting: what the environment does not name stays the file's."""
    kvberth_command("up", "--config", settings_file(UP), KVBERTH_UP_PREFILL="3")
    assert (cluster.settings.prefill, cluster.settings.block_size) == (3, 16)


def test_flags_override_everything(kvberth_command, cluster, settings_file):
    """The last word is the command line's."""
    kvberth_command("up", "--prefill", "4", "--config", settings_file(UP), KVBERTH_UP_PREFILL="3")
    assert cluster.settings.prefill == 4


def test_the_file_itself_may_come_from_the_environment(kvberth_command, cluster, settings_file):
    """KVBERTH_CONFIG is for every command that takes a file."""
    kvberth_command("up", KVBERTH_CONFIG=str(settings_file(UP)))
    assert cluster.settings.model == "from-file"


def test_each_command_reads_its_own_table(kvberth_command, served, settings_file):
    """One file serves all commands."""
    path = settings_file(UP + "[router]\ndecode = ['http://d:1', 'http://d:2']\nconnect_timeout_seconds = 2\n")
    assert kvberth_command("router", "--config", path).exit_code == 0
    assert (served[0].decode, served[0].connect_timeout_seconds) == (("http://d:1", "http://d:2"), 2.0)


def test_a_list_in_the_environment_is_split_at_spaces(kvberth_command, served):
    """As there is only one variable."""
    kvberth_command("router", KVBERTH_ROUTER_DECODE="http://d:1 http://d:2")
    assert served[0].decode == ("http://d:1", "http://d:2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[up]\nprefil = 2",
            "[up]: unknown key 'prefil'; known are model, emulate, emulate_link, prefill, decode, undivided, mode,",
        ),
        ("[up]\nconfig = 'x'", "[up]: unknown key 'config'; known are"),
        ("[router]\nmodel = 'm'", "[router]: unknown key 'model'; known are engine, prefill, decode,"),
        ("[upp]\n", "unknown table 'upp'; known are up, router"),
        ("prefill = 2", "unknown table 'prefill'; known are up, router"),
        ("up = 2", "[up]: must be a table of settings"),
        ("[up]\nengine_arg = '--seed=1'", "[up] engine_arg: must be a list"),
        ("[up]\nprefill = [1]", "[up] prefill: must be text or a number, not [1]"),
        ("[up]\nprefill = true", "[up] prefill: must be text or a number, not true"),
        ("[up\n", "is not TOML: "),
    ],
)
def test_a_bad_file_is_one_line(kvberth_command, cluster, settings_file, text, message):
    """It names the file, the place and what would be right; even where only another command reads that table."""
    path = settings_file(text)
    result = kvberth_command("up", "--model", "m", "--config", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"kvberth: {path}: {message}")
    assert result.stderr.count("\n") == 1
    assert cluster.settings is None


def test_a_missing_file_is_an_error(kvberth_command, cluster, tmp_path):
    """A path with a typing mistake does not mean defaults."""
    result = kvberth_command("up", "--model", "m", "--config", tmp_path / "none.toml")
    assert result.exit_code == 2
    assert result.stderr == f"kvberth: {tmp_path / 'none.toml'}: cannot be read: No such file or directory\n"


def test_a_bad_value_tells_its_origin(kvberth_command, cluster, settings_file):
    """Nobody has typed the flag that the message names, so it says who did. 2.5 is not rounded."""
    path = settings_file("[up]\nprefill = 2.5\n")
    assert f"(from [up] in {path})" in kvberth_command("up", "--model", "m", "--config", path).stderr
    assert "(from KVBERTH_UP_PREFILL)" in kvberth_command("up", "--model", "m", KVBERTH_UP_PREFILL="x").stderr
    assert "(from" not in kvberth_command("up", "--model", "m", "--prefill", "x").stderr
    assert cluster.settings is None
