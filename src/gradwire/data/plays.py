"""Shakespeare's 37 plays as speeches by role, from one CSV per play (the MIT edition of the
public-domain text, as in github.com/diversen/shakespeare-plays). Rows fill one kind of column:
a Chapter opens a scene, a Player opens a speech, a Line is spoken.
"""

import csv
import io
from pathlib import Path

from gradwire.data import files
from gradwire.data.files import DataFile

URL = (
    "https://raw.githubusercontent.com/diversen/shakespeare-plays/"
    "e3b8dd5a9e16a9058b2b58eb6e589ff79b5fd7e8/csv/"
)
LIMIT_BYTES = 1 << 20  # the longest play has 238,134 bytes
_COLUMNS = ("Chapter", "Player", "Line")

# play, size in bytes and SHA-256 of its CSV
_TABLE = """
a_midsummer_nights_dream 125970 903c2a9085aa1e01fb3e741407a1489353ac15800e8b4d8c4c447f212e59d6e1
alls_well_that_ends_well 175518 60aec4bb350528419070efea575b5d66330d9d3bf94884d40fb3914677dcd2da
antony_and_cleopatra 206679 ff8232563f1f1567e796f150dfdfa7d2efe7296352a7ed3a83bff9cc070c23f1
as_you_like_it 161878 4bcc244a02866c9dd1b753374b76435286de0816ac6032414f9a4ebe6209df39
coriolanus 219279 903432328c3e460aa527726d5eae65fb3798be6dc76a03c2ba33f07fe7eaf51a
cymbeline 214521 b2fb105185f68aeffaa40985f8a1f0a2486b6cb4e01f94962e5dc7ab8dba0c23
hamlet 238134 266d38f24eba57bf035ee03ef0390897a08456d7730ca52aa98f38703763711a
henry_iv_part_1 186277 b663700c25d646c1d5f3b6b85e3c4b5ac6603439cb675aa20d87512e9aad7a26
henry_iv_part_2 201268 53cd46e494fea69da3dafd13c955831fb9aaac0b9924246204a49815e58c9810
henry_v 197621 81d078aa8c4cafb88c73559237621ab20caa078039f3d8d9e07e0e6489bd5397
henry_vi_part_1 169354 c1c6d3d28781172b7e5970bdf8ddd2501da2360eee9ea008b74e99303af27b45
henry_vi_part_2 194510 56f817fb18f75f7dcd0829cc7b855224ac8d2e32c63529d10e56db466376411a
henry_vi_part_3 187212 d468c8b8e26759d058410a3f74cdc8836fb3d04559ea2e558055670f9864eaf9
henry_viii 191456 7d3c147d9480eb3dbf1fe1700c9e415b929995d76604cb663358c6285f728280
julius_caesar 153395 3f2970e33300a8083efac74eae3fa78c92e2e8f945757f413c6fb9c4113cb996
king_john 157590 d635230e6acb58471b2b344dbe50f2640e35fee1a4b2f6a8abe787acbf3f2435
king_lear 206047 7d0578efe063c49f68bedad9bbe45bb13966a97991d05c59b8c891f6de965a1c
loves_labours_lost 171648 e694f722ec23f745182ec4ff0842f28e7840a5325cb3b5a3f3c6650af0d8f074
macbeth 136367 8d3011093bd0fedc9f55d2e4f948b38a02368400ed71da18853f521a4fa2b8ee
measure_for_measure 169968 df2ef2040efd372a4daac046ef50baae124fe16ef6aef76071147a782952d199
much_ado_about_nothing 160453 9dc2d4baba2b9f749f67c6c68d1f3a79263a0549be6b6ebd0c35f34fe27c7886
othello 206917 d2df426ed42204a66d56f1962e85c49a9ffb3baffc85981435d27ec794a7eba3
pericles_prince_of_tyre 144150 69c484c72f66ab204b46a9b7b6f5e3d849373dd257975efb14fe1c4510994ad0
richard_ii 171550 05a665b7f8aaa1b7cd8c770fec8360ff79f9d7a698766f7a38f79afd1a7bd7dc
richard_iii 230499 9e84093938c9e4a56265015c62fe6ab05c622d075fe2d5ddae1e408b0077e332
romeo_and_juliet 186283 fdc044d0b34b7cd94df227e3bbe683f3d90d7880ad45711f867a6ad25f1ec3a9
taming_of_the_shrew 161476 d94c015024cf00754f9ec239c39e4cb8ed95247cae31efca0b3b9b08e2164e3c
the_comedy_of_errors 116843 e5d98e9b3f52802c081aead24deec6e33a1a16b80f5b6085d7537cd43efd462b
the_merchant_of_venice 158064 bdc2c5953ee6335021bd9f6c97db1b481feb9b4a712e75be00ae862d7e9c2f80
the_merry_wives_of_windsor 169049 2fe1272f4864efc83455da25acd1e4f3384c56ee381a251ba208e66f9eff747c
the_tempest 130810 c3d0ead5af4d7d8cb221029c860b2d2259bb483b1ea9631c213b455615b3ba68
timon_of_athens 147378 eb5a24dedb450b6d8be360a791969b3fa5c31ed50b1253685b07ef1c9cd912b8
titus_andronicus 158594 4a57c5c994bc06560012477edcf27aa44b6e214552d5ce1eb1a9fc43d5940e33
troilus_and_cressida 207788 b39637db7eb56ec571ff409774986a958aabdfc811d9a44501782d075d722fec
twelfth_night 152367 ab66cc0e337e45f1db22a66c7cdbca654a0242e6fa95770e3df4bb0ea4161ef0
two_gentlemen_of_verona 133207 4ac7ff2fa3df7f3d68dcd79e354d3741732b08f5b149b003d217adb248dc85b6
winters_tale 190855 b83a713e5da888b32655446a6bd45673ee693351ee7b3acdf435647b63b83047
"""
PLAYS = {
    play: (int(size_bytes), sha256)
    for play, size_bytes, sha256 in (line.split() for line in _TABLE.strip().splitlines())
}


def speeches_by_role(play: str, content: bytes, path: Path) -> dict[str, list[str]]:
    """`PLAY/ROLE` -> that role's speeches in order, their lines joined by line breaks.

    A scene begins without a speaker, so prologues without a name are left out; where two players
    open a speech together, the second has it.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(content.decode("ascii"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise files.damaged(path, f"{play} is not a CSV in ASCII ({error})") from error
    if not rows or any(column not in rows[0] for column in _COLUMNS):
        raise files.damaged(path, f"{play} needs columns {', '.join(_COLUMNS)} and some rows")

    roles: dict[str, list[str]] = {}
    role: str | None = None
    opens = True
    for row in rows:
        if row["Player"]:
            role = " ".join(row["Player"].upper().split())
            opens = True
        elif row["Line"] and role is not None:
            line = row["Line"].replace("\t", " ")
            speeches = roles.setdefault(f"{play}/{role}", [])
            if opens:
                speeches.append(line)
            else:
                speeches[-1] += "\n" + line
            opens = False
        elif row["Chapter"]:
            role = None
    return roles


def play_file(play: str) -> DataFile:
    size_bytes, sha256 = PLAYS[play]
    name = f"{play}.csv"
    return DataFile("shakespeare/csv", name, URL + name, size_bytes, sha256)
