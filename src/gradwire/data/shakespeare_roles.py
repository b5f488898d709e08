"""Next-character prediction with one client per speaking role of Shakespeare's plays, the natural
federated split of McMahan et al. 2017 and LEAF (Caldas et al. 2018). It is made like theirs but
from another edition and parse, so numbers are not comparable with LEAF's. Every role with at
least MIN_CHARACTERS trains on the first nine tenths of its text and is tested on the last.
"""

import json
import string
from collections.abc import Mapping
from pathlib import Path

import torch

from gradwire.data import files, plays, text
from gradwire.data.dataset import Dataset

MIN_CHARACTERS = 1000  # the tenth for testing then fills at least one window
BY_ROLE = "plays_by_role.json.gz"  # what `speeches_by_role` finds in all plays, if made before
ARCHIVE = "plays_csv.tar.gz"  # the CSV of every play
VOCABULARY = "".join(sorted("\n !$&',-.:;?[]" + string.digits + string.ascii_letters))

_FOLDERS = ("shakespeare",)
_LIMIT_BYTES = 1 << 24


def load() -> Dataset:
    if (path := files.find(BY_ROLE, _FOLDERS)) is not None:
        speeches = read_by_role(path)
    elif (path := files.find(ARCHIVE, _FOLDERS)) is not None:
        speeches = read_archive(path)
    else:
        path, speeches = _read_plays()
    return assemble(speeches, path)


def assemble(speeches: Mapping[str, list[str]], path: Path) -> Dataset:
    """The data set of these speeches per role; `path` is where they come from, for errors."""
    # a line break ends every speech
    texts = ("".join(f"{speech}\n" for speech in of_role) for of_role in speeches.values())
    kept = [text.encode(t, VOCABULARY, path) for t in texts if len(t) >= MIN_CHARACTERS]
    if not kept:
        raise files.damaged(path, f"no role speaks {MIN_CHARACTERS} characters")
    train = [text.windows(text.split(numbers)[0]) for numbers in kept]
    test = [text.windows(text.split(numbers)[1]) for numbers in kept]
    sizes = [len(inputs) for inputs, _ in train]
    return Dataset(
        name="shakespeare_roles",
        kind="text",
        train_inputs=torch.cat([inputs for inputs, _ in train]),
        train_targets=torch.cat([targets for _, targets in train]),
        test_inputs=torch.cat([inputs for inputs, _ in test]),
        test_targets=torch.cat([targets for _, targets in test]),
        num_classes=len(VOCABULARY),
        vocabulary=VOCABULARY,
        roles=torch.arange(sum(sizes)).split(sizes),
    )


def read_by_role(path: Path) -> dict[str, list[str]]:
    content = files.read(path, _LIMIT_BYTES)
    try:
        roles = json.loads(content)
    except (ValueError, RecursionError) as error:  # of which decoding errors are a kind
        raise files.damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(roles, dict) or not all(
        isinstance(speeches, list) and all(isinstance(speech, str) for speech in speeches)
        for speeches in roles.values()
    ):
        raise files.damaged(path, "it is not an object of role: [speech, ...]")
    return roles


def read_archive(path: Path) -> dict[str, list[str]]:
    contents = dict(files.read_archive(path, plays.LIMIT_BYTES))
    missing = [play for play in plays.PLAYS if f"{play}.csv" not in contents]
    if missing:
        raise files.damaged(path, f"it does not hold the plays {', '.join(missing)}")
    roles: dict[str, list[str]] = {}
    for play in plays.PLAYS:
        roles |= plays.speeches_by_role(play, contents[f"{play}.csv"], path)
    return roles


def _read_plays() -> tuple[Path, dict[str, list[str]]]:
    roles: dict[str, list[str]] = {}
    for play in plays.PLAYS:
        path = files.obtain(
            plays.play_file(play), f"All {len(plays.PLAYS)} plays are needed, each as a file there."
        )
        roles |= plays.speeches_by_role(play, files.read(path, plays.LIMIT_BYTES), path)
    return path.parent, roles
