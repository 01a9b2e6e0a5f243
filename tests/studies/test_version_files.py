"""Version files as modules, each loaded by itself, and the flags that comparisons share."""

import re
import sys
from dataclasses import replace

from common import cli
from studies import version_files
from tests.conftest import run_options
from tracepage.errors import UsageError
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch

VERSION = "TinyLlama = make_model = make_optimizer = make_step = None\n"


def test_two_versions_with_one_name_do_not_mix(tmp_path):
    before, found = dict(sys.modules), []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "version.py").write_text(f"NAME = {name!r}\n{VERSION}")
        found.append(version_files.load(tmp_path / name / "version.py"))
    assert [module.NAME for module in found] == ["first", "second"]
    assert sys.modules == before and not any(str(tmp_path) in entry for entry in sys.path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.py", None, "is not a Python file"),
        ("notes.txt", "hello", "is not a Python file"),
        (
            "half.py",
            "class TinyLlama: pass\ndef make_model(options): pass\n",
            "it has no make_optimizer, make_step",
        ),
        (
            "broken.py",
            "import no_such_module\n",
            "cannot be imported: No module named 'no_such_module'",
        ),
        ("cut.py", "def make_model(\n", "cannot be imported: '(' was never closed"),
    ],
)
def test_a_file_that_is_no_version_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=re.escape(message)):
        version_files.load(tmp_path / name)


def test_a_comparison_reads_its_flags_as_a_run_does():
    flags = "--preset small --batch-size 2 --seq-len 32 --seed 9 --device cpu --use-amp --amp-dtype float16"
    of_a_run = vars(run_options(tiny_llama_v1, *flags.split()))
    of_a_comparison = vars(
        version_files.resolve(version_files.parser(None).parse_args(flags.split()))
    )
    assert of_a_comparison["seq_len"] == 32 and of_a_comparison.items() <= of_a_run.items()


@pytest.mark.parametrize("flag", ["--batch-size", "--seq-len"])
def test_a_comparison_without_a_flag_takes_the_preset(flag):
    parser = version_files.parser(None, flag)
    options = version_files.resolve(parser.parse_args(["--preset", "medium"]))
    assert (options.batch_size, options.seq_len) == (16, 512)
    with pytest.raises(UsageError, match=f"unrecognized arguments: {flag} 4"):
        cli.parse(parser, [flag, "4"])


def test_a_flag_that_the_version_does_not_have_is_refused():
    options = version_files.resolve(version_files.parser(None).parse_args([]))
    with pytest.raises(UsageError, match="unrecognized arguments: --enable-qkv-fusion"):
        version_files.switched(tiny_llama_v1, options, "--enable-qkv-fusion")


def test_the_random_batch_is_that_of_the_seed():
    options = version_files.resolve(
        version_files.parser(None).parse_args(["--batch-size", "2", "--seq-len", "8"])
    )
    ids, targets = version_files.random_batch(options, torch.device("cpu"))
    assert ids.shape == (2, 8) and torch.equal(ids[:, 1:], targets[:, :-1])
    other = version_files.random_batch(replace(options, seed=1), torch.device("cpu"))
    assert not torch.equal(other[0], version_files.random_batch(options, torch.device("cpu"))[0])
