"""What does not work says what was given, what was expected and what to do."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import gradwire
from gradwire import Config


def net():
    return nn.Linear(4, 3)


class Branches(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        return super().forward(x if x.sum().item() > 0 else -x)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4), 0


class Dicts(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"x": torch.zeros(4), "y": index % 3}


class Lengths(Dicts):
    def __getitem__(self, index):
        return torch.zeros(index + 1), index % 3


class Triples(Dicts):
    def __getitem__(self, index):
        return torch.zeros(4), index % 3, "more"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": 3}, r"expected an nn\.Module, or a function without arguments.*; got 3"),
        ({"model": lambda: "net"}, r"object:lambda returned 'net'\. Expected an nn\.Module"),
        ({"model": lambda size: net()}, r"making the model failed: TypeError.*argument: 'size'"),
        ({"model": lambda: nn.LazyLinear(3)}, r"parameter weight of a lazy layer has no shape yet"),
        ({"model": lambda: nn.ReLU()}, r"ReLU has no parameters to train$"),
        ({"model": lambda: net().requires_grad_(False)}, r"all 2 are frozen"),
        (
            {"model": lambda: net().to(torch.complex64)},
            r"Linear are torch\.complex64; only those of",
        ),
        ({"model": lambda: nn.DataParallel(net())}, r"wrapped in DataParallel.*wrapped\.module"),
        (
            {"model": lambda: nn.Linear(5, 3)},
            r"does not work on a batch of object:tensors: Runtime",
        ),
        ({"model": ""}, r"data = object:tensors is your own: say which model"),
        ({"data": torch.zeros(4, 4)}, r"expected data = \(train, test\).*shape \[4, 4\]"),
        ({"data": (torch.zeros(8, 4), torch.zeros(8))}, r"got a tuple of a tensor.*tensor"),
        ({"data": (Stream(), Stream())}, r"an IterableDataset \(Stream\).*cannot be dealt"),
        ({"data": (Dicts(), Dicts())}, r"must be a pair \(inputs, targets\); got a dict with 'x'"),
        ({"data": (Triples(), Triples())}, r"got a list of a tensor of shape \[1, 4\].*collate="),
        ({"data": (Lengths(), Lengths())}, r"default_collate cannot make a batch.*collate="),
        ({"data": (DataLoader(Dicts()),) * 2}, r"is a DataLoader.*loader\.dataset"),
        ({"data": ([], [])}, r"the train data has no examples"),
        ({"data": lambda: 1 / 0}, r"making the data failed: ZeroDivisionError"),
        ({"data": ((torch.zeros(8, 4), torch.zeros(9)),) * 2}, r"the same first dimension"),
        ({"loss": lambda outputs, targets: outputs}, r"loss of object:net must be one number"),
        ({"loss": lambda outputs, targets: 1.0}, r"loss of object:net must be one number.*got 1.0"),
        ({"metric": lambda outputs, targets: outputs}, r"metric of object:net must be one number"),
        ({"loss": "hinge"}, r"loss = 'hinge' is unknown: expected one of cross_entropy, mse"),
        ({"metric": "f1"}, r"one of accuracy, loss, or MODULE:NAME"),
        ({"model": "mlp", "loss": "mse"}, r"loss = 'mse' is for a model of your own"),
        ({"data": "digits", "collate": len}, r"collate = 'builtins:len' is for data of your own"),
        ({"batch_size": 500}, r"need 1000 examples per step, object:tensors has 96"),
        ({"evaluation": "vmap", "model": lambda: Branches()}, r"cannot be evaluated by vmap.*item"),
        ({"optimiser": "sgd(0.1)"}, r"unknown setting 'optimiser'"),
    ],
)
def test_what_is_wrong(points, simulate, changed, message):
    made = {"model": given(net), "data": points}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        simulate(**{**made, **changed})


def given(factory):
    """A factory that has the name of the given one, and cannot be imported."""

    def net():
        return factory()

    return net


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (1, torch.zeros(40), r"outputs \[8, 1\] and targets \[8\]"),
        (1, torch.zeros(40, dtype=torch.long), r"cross entropy needs.*\[8, 1\] and targets \[8\]"),
        (3, torch.zeros(40, dtype=torch.bool), r"torch\.bool have no default loss"),
    ],
)
def test_outputs_that_do_not_fit_the_targets(simulate, outputs, targets, message):
    data = ((torch.zeros(40, 4), targets),) * 2
    with pytest.raises(ValueError, match=f"(?s){message}"):
        simulate(model=lambda: nn.Linear(4, outputs), data=data)


def test_an_error_names_the_line_of_the_users_code(points, simulate):
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(x) + torch.zeros(7)

    with pytest.raises(ValueError, match=r"object:Wrong.*test_messages\.py, line \d+\): Runtime"):
        simulate(model=Wrong, data=points)


def test_labels_that_are_not_known(simulate, points):
    class Pairs(Dicts):
        def __getitem__(self, index):
            return torch.zeros(4), index % 3

    with pytest.raises(ValueError, match=r"object:Pairs does not say the labels.*`targets`"):
        simulate(model=net, data=(Pairs(), Pairs()), partition="by_label(2)")


def test_a_config_holds_texts_only():
    with pytest.raises(ValueError, match=r"model of a Config is a string, got function.*simulate"):
        Config(model=net)


def test_modules_that_do_not_exist():
    with pytest.raises(ValueError, match=r"model = no_such_file:make: there is no module no_such"):
        gradwire.simulate(model="no_such_file:make")
    with pytest.raises(ValueError, match=r"has no make_it. It has: .*default_collate"):
        gradwire.simulate(data="torch.utils.data:make_it")
    with pytest.raises(ValueError, match=r"has no DataLaoder\. Did you mean DataLoader\? It has"):
        gradwire.simulate(data="torch.utils.data:DataLaoder")
    with pytest.raises(ValueError, match=r"unknown model 'my_file'.* is MODULE:NAME, my_file:make"):
        gradwire.simulate(model="my_file")


def test_a_model_without_its_data():
    match = r"on a batch of digits \(your own data are data=\(train, test\), or --data MODULE"
    with pytest.raises(ValueError, match=match):
        gradwire.simulate(model=net)
