"""The scripts for shell completion, as docs/commands.md has them made."""

import shutil
import subprocess

import pytest

from gradwire.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_script_is_written_that_knows_commands_and_options(shell, tmp_path, capsys):
    path = tmp_path / "script"
    with pytest.raises(SystemExit) as caught:
        main(["--tyro-write-completion", shell, str(path)])
    assert not caught.value.code
    script = path.read_text()
    for word in ("run", "compare", "--compression", "--workers", "--figure-format"):
        assert word in script
    with pytest.raises(SystemExit):
        main(["--tyro-print-completion", shell])
    assert "--compression" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_with_it(tmp_path):
    path = tmp_path / "script"
    with pytest.raises(SystemExit):
        main(["--tyro-write-completion", "bash", str(path)])
    ask = """
source "$0"
COMP_WORDS=(gradwire run --compr); COMP_CWORD=2; COMP_LINE="gradwire run --compr"
$(complete -p gradwire | sed 's/.*-F \\([^ ]*\\).*/\\1/') gradwire --compr run
echo "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        ["bash", "-c", ask, str(path)], capture_output=True, text=True, check=True
    )
    assert "--compression" in done.stdout
