"""Configurations are values that survive a trip through TOML."""

import inspect
from dataclasses import replace

import pytest

from gradwire.experiment.run.config import Config


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
        ("workers = 3.5", "workers must be a whole number, got 3.5"),
        ('epochs = "many"', "epochs must be a number, got 'many'"),
        ("workers = true", "workers must be a whole number, got True"),
        ('workers = "4"', "got '4'. Write workers = 4, without quotes"),
        ('what_if = "1Gbit"', r'a list of strings, got \'1Gbit\'. Write what_if = \["1Gbit"\]'),
        ("[optimizer]\nlr = 0.1", r'\[optimizer\] is a section.*Write optimizer = "sgd\(0.1, mom'),
        ("[bandwidth]\nup = 1", r'\[bandwidth\] is a section.*Write bandwidth = "1Gbit"'),
        ("[[run]]\nworkers = 4", r"\[\[run\]\] is a list of sections.*gradwire compare"),
        ("[[optimizer]]\nlr = 1", r"\[\[optimizer\]\] is a list of sections"),
        ("steps = 5\nepochs = 3", "steps = 5 and epochs = 3.* both.*Leave one of them out"),
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


def test_a_folder_is_no_configuration_file(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder, not a configuration file\. Name a TOML"):
        Config.from_toml(tmp_path)
    (tmp_path / "config.toml").write_text("workers = 2")
    with pytest.raises(ValueError, match=r"is a folder.* Write .*config\.toml\."):
        Config.from_toml(tmp_path)


def test_steps_hold_in_a_file_with_all_settings(tmp_path):
    config = Config(steps=5)
    assert replace(config, epochs=3.0).steps == 5
    path = tmp_path / "config.toml"
    lines = replace(config, epochs=3.0).to_toml().splitlines(keepends=True)  # as a run writes it
    path.write_text("".join(lines))
    assert Config.from_toml(path) == replace(config, epochs=3.0)
    path.write_text("".join(lines[:-3]))  # of another version
    assert Config.from_toml(path) == replace(config, epochs=3.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.1}, r'unknown setting \'lr\'.*optimizer = "sgd\(0\.1\)"'),
        ({"momentum": 0.9}, r'optimizer = "sgd\(0\.1, momentum=0\.9\)"'),
        ({"worker": 3}, "Did you mean workers"),
        ({"workers": "4"}, "workers must be a whole number, got '4'"),
        ({"what_if": "1Gbit"}, "what_if must be a list of strings"),
        ({"steps": 5, "epochs": 3}, "steps = 5 and epochs = 3.* both"),
    ],
)
def test_a_wrong_config_in_python_is_answered_in_our_words(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_lists_and_whole_numbers_are_taken_in_python_as_in_a_file():
    config = Config(what_if=["1Gbit"], epochs=3)  # type: ignore[arg-type]
    assert config == Config(what_if=("1Gbit",), epochs=3.0)
    assert hash(config) == hash(replace(config))
    assert str(inspect.signature(Config)).startswith("(data: str = 'digits', model: str = ''")


def test_whole_numbers_stand_for_reals(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("epochs = 3")
    assert Config.from_toml(path).epochs == 3.0
