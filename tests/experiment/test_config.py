"""Configurations are values that survive a trip through TOML."""

import pytest

from gradwire.experiment.config import Config


def test_toml_round_trip(tmp_path):
    config = Config(
        compression='topk(0.01) >> qsgd(3, norm="l2")',
        what_if=("1Gbit", "10Gbit"),
        seed=7,
        epochs=0.5,
        augment=False,
    )
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert Config.from_toml(path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers = ", "not TOML"),
        ("worker = 3", "Did you mean workers"),
        ("workers = 3.5", "workers must be int"),
        ('epochs = "many"', "epochs must be float"),
        ("workers = true", "workers must be int"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Config.from_toml(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no configuration file"):
        Config.from_toml(tmp_path / "nowhere.toml")


def test_whole_numbers_stand_for_reals(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("epochs = 3")
    assert Config.from_toml(path).epochs == 3.0
