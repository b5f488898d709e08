"""Where the times of layers come from, and how they are recorded."""

import pytest

import gradwire
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from gradwire.training.layer_times import LAYER_TIMES

SMALL = {
    "model": "mlp((16, 8))",  # layers 1, 3 and 5
    "steps": 2,
    "scheduling": "wfbp",
    "compute": "fixed(1.0)",
    "threads": 1,
}


def profile(layer_times: str):
    return prepare(Config(layer_times=layer_times, **SMALL)).plan.layer_profile


def test_flops_divide_the_time_of_the_gradient():
    found = profile("flops")
    assert [layer.name for layer in found.layers] == ["1", "3", "5"]
    products = [64 * 16, 16 * 8, 8 * 10]
    total = 3 * sum(products)
    assert found.forward_s == pytest.approx([own / total for own in products])
    assert found.backward_s == pytest.approx([2 * own / total for own in products])
    assert found.total_s == pytest.approx(1.0)


def test_given_times_are_shares():
    found = profile("given((1.0, 2.0, 1.0), backward=(2.0, 2.0, 8.0))")
    assert found.forward_s == pytest.approx([1 / 16, 2 / 16, 1 / 16])
    assert found.backward_s == pytest.approx([2 / 16, 2 / 16, 8 / 16])
    assert found.backward_ends() == pytest.approx([1.0, 14 / 16, 12 / 16])


def test_times_from_a_file_are_recorded_as_numbers(tmp_path):
    path = tmp_path / "layers.toml"
    path.write_text(
        "[1]\nforward = 1.0\nbackward = 2\n"
        '["3"]\nforward = 2.0\nbackward = 2.0\n'
        "[5]\nforward = 1.0\nbackward = 8.0\n"
    )
    experiment = prepare(Config(layer_times=f'layer_table("{path}")', **SMALL))
    assert experiment.config.layer_times == "given((1.0, 2.0, 1.0), backward=(2.0, 2.0, 8.0))"
    assert experiment.plan.layer_profile == profile(experiment.config.layer_times)


def test_tables_of_nested_modules(tmp_path):
    path = tmp_path / "layers.toml"
    path.write_text("[1]\nforward = 1.0\nbackward = 2.0\n[3]\nforward = 2.0\n")
    with pytest.raises(ValueError, match=r"layer '3' a table with forward and backward.*got"):
        profile(f'layer_table("{path}")')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]\nforward = 1.0\n", "expected for the layer '1' a table with forward and backward"),
        ("[1]\nforward = 1.0\nbackward = -1.0\n", "seconds of at least 0"),
        ('[1]\nforward = "x"\nbackward = 1.0\n', "seconds of at least 0"),
        ("", "expected for the layer '1'"),
        ("[1", "cannot be read"),
    ],
)
def test_files_that_are_refused(content, message, tmp_path):
    path = tmp_path / "layers.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        profile(f'layer_table("{path}")')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('layer_table("missing.toml")', "missing.toml.*cannot be read"),
        ("given((1.0,), backward=(1.0,))", "has times of 1 and 1 layers; the model has 3: 1, 3, 5"),
        ("given((1.0, 1.0, -1.0), backward=(1.0, 1.0, 1.0))", "at least 0"),
        ("given((0.0, 0.0, 0.0), backward=(0.0, 0.0, 0.0))", "positive"),
        ("guessed", "flops"),
    ],
)
def test_times_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        profile(text)


def test_measured_times_are_recorded_as_numbers():
    run = gradwire.simulate(layer_times="hooks", **SMALL)
    assert run.config.layer_times.startswith("given((")
    again = gradwire.simulate(run.config)
    assert again.virtual_time_s == run.virtual_time_s
    shares = LAYER_TIMES.parse(run.config.layer_times)
    assert len(shares.forward) == len(shares.backward) == 3
    assert min(shares.forward + shares.backward) > 0


def test_without_overlap_nothing_is_measured():
    experiment = prepare(Config(**{**SMALL, "scheduling": "sequential"}, layer_times="hooks"))
    assert experiment.config.layer_times == "hooks"
    assert experiment.plan.layer_profile is None
