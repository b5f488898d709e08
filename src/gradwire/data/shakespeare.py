"""Next-character prediction on 1.1 MB of Shakespeare, the "tinyshakespeare" of Karpathy's
char-rnn: windows of 80 characters, the last tenth of the text for testing. The text is in the
public domain.
"""

import string

from gradwire.data import files, text
from gradwire.data.dataset import Dataset
from gradwire.data.files import DataFile

FILE = DataFile(
    folder="shakespeare",
    name="input.txt",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/"
    "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
    size_bytes=1_115_394,
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    other_folders=("tinyshakespeare",),
)
VOCABULARY = "".join(sorted("\n !$&',-.3:;?" + string.ascii_letters))


def load() -> Dataset:
    path = files.obtain(FILE)
    content = files.read(path, FILE.size_bytes)
    # `input.txt` is a common name: make sure that it is this one
    if len(content) != FILE.size_bytes:
        raise files.damaged(path, f"{len(content):,} bytes, expected {FILE.size_bytes:,}")
    numbers = text.encode(content.decode("latin-1"), VOCABULARY, path)
    train, test = text.split(numbers)
    train_inputs, train_targets = text.windows(train)
    test_inputs, test_targets = text.windows(test)
    return Dataset(
        name="shakespeare",
        kind="text",
        train_inputs=train_inputs,
        train_targets=train_targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
        num_classes=len(VOCABULARY),
        vocabulary=VOCABULARY,
    )
