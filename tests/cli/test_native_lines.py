"""What the table says of bytes that nobody counts."""

import pytest

from experiment.processes_at_work import FLAGS, gradwire_run


@pytest.mark.few
@pytest.mark.parametrize("is_native", [True, False])
def test_bytes_of_native_means_are_not_said_to_be_counted(tmp_path, is_native):
    given = ("--engine", "process", "--workers", "2", *FLAGS, "--compression", "identity")
    given += ("--steps", "20", "--out", str(tmp_path / "run"))
    with gradwire_run(*given, *(["--native"] if is_native else [])) as command:
        code, said = command.end()
    assert code == 0, said
    words = " ".join(said.split())
    assert ("computed for native means, not counted" in words) == is_native
    assert ("bytes with framing not known" in words) == is_native
