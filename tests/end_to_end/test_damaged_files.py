"""Whatever is wrong in a file, its reader and its reports end well or with one line that names the file."""

import random
from pathlib import Path

from common.errors import UsageError
from tests import damaged
from tests.valid_files import VALID, Valid

import pytest

SEED = 13
OF_VALUES, OF_WHOLE = 8, 4  # damages of each file


@pytest.mark.filterwarnings("ignore:Polyfit", "ignore:Glyph")
@pytest.mark.parametrize("valid", VALID, ids=lambda valid: valid.name)
def test_damage_ends_well_or_in_one_line(tmp_path: Path, monkeypatch, valid: Valid):
    monkeypatch.chdir(tmp_path)
    generator, path = random.Random(f"{SEED} {valid.name}"), tmp_path / valid.name
    valid.write(path)
    valid.use(path)
    values, whole = damaged.of(path, generator)
    refused = 0
    for name, damage in generator.sample(values, OF_VALUES) + generator.sample(whole, OF_WHOLE):
        valid.write(path)
        damage(path)
        try:
            valid.use(path)
        except UsageError as error:
            message, refused = str(error), refused + 1
            named = str(tmp_path) in message or path.name in message or path.suffix == ".yaml"  # its values can be of flags
            assert message.isprintable() and named, f"{name}: {message}"
        except Exception as error:
            pytest.fail(f"{name}: {type(error).__name__}: {error}")
    assert refused
