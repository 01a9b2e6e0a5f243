"""The effect of each fusion follows from the pairs of combinations; the report shows what a study
measured.
"""

import csv

from studies import ablation
from tests import records
from tracepage.errors import UsageError
from tracepage.files import schema_of, write_json
from tracepage.records.study_files import Ablation
from tracepage.views import fusion_ablation

import pytest

GAINS = dict(zip(fusion_ablation.FUSIONS, (1.25, 2.0, 0.8, 1.1, 1.5), strict=True))


def made_up(every: bool = True) -> dict:
    """A study in which each fusion divides time, memory and launches by its gain, whatever the
    others do.
    """
    found = []
    for fusions in ablation.combinations(every, True):
        setting = dict(zip(fusion_ablation.FUSIONS, fusions, strict=True))
        ms = 100.0
        for name, on in setting.items():
            ms /= GAINS[name] if on else 1
        found.append(
            {
                "fusions": setting,
                "flags": ablation.flags_for(fusions),
                "round_ms": [ms, 1.1 * ms],
                "loss": 1.0,
                "steps": 5,
                "step_ms": {"median": ms, "p20": 0.9 * ms, "p80": 1.1 * ms, "count": 20},
                "peak_mib": 10 * ms,
                "launches_per_step": 20 * ms,
            }
        )
    run = records.record(training={"batch_size": 2, "sequence_length": 9, "seed": 0})
    header = {
        key: run[key]
        for key in (
            "command",
            "date",
            "version",
            "device",
            "environment",
            "model",
            "precision",
            "training",
        )
    }
    return header | {
        "schema": schema_of(Ablation),
        "rounds": 2,
        "steps_per_round": 10,
        "left_out": None,
        "counted": "kernels",
        "notes": [],
        "combinations": found,
    }


@pytest.mark.parametrize("every, pairs", [(True, 8), (False, 2)])
def test_the_effect_is_the_mean_over_the_pairs(every, pairs):
    measured = made_up(every)
    for effect in fusion_ablation.effects(measured["combinations"]):
        assert effect.pairs == (2 if effect.fusion == "fused_adamw" else pairs)
        gain = pytest.approx(GAINS[effect.fusion])
        assert (effect.time, effect.memory, effect.launches) == (
            gain,
            gain,
            gain,
        ) and effect.rounds == (gain, gain)
    header, rows = fusion_ablation.combination_table(measured)
    assert rows[-1][header.index("speed-up")] == pytest.approx(1.25 * 2.0 * 0.8 * 1.1 * 1.5)


def test_the_mean_is_geometric():
    measured = made_up()["combinations"]
    # all on but AdamW: each other fusion looks worse in the one pair that ends here
    measured[-2]["step_ms"]["median"] *= 2
    for effect in fusion_ablation.effects(measured):
        factor = 2 ** (1 / 2) if effect.fusion == "fused_adamw" else 2 ** (-1 / 8)
        assert effect.time == pytest.approx(GAINS[effect.fusion] * factor)
        # from the medians of the rounds
        assert effect.rounds == pytest.approx((GAINS[effect.fusion],) * 2)


def test_a_study_without_memory_that_ended_before_it_counted_has_its_times(tmp_path):
    measured, path = made_up(), tmp_path / "fusion_ablation.json"
    for combination in measured["combinations"]:
        combination |= {"loss": None, "launches_per_step": None, "peak_mib": None}
    write_json(path, measured | {"notes": [ablation.ENDED_EARLY]})
    text = fusion_ablation.render_ablation(path).publish(tmp_path, "fusion_ablation")
    assert (
        "speed-up" in text
        and "Peak memory is not given" in text
        and "kernels/step" not in text
        and "lie" not in text
    )
    with (tmp_path / "fusion_ablation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (
        len(rows) == 18 and float(rows[0]["ms/step"]) == 100.0 and rows[0]["fusions on"] == "none"
    )
    write_json(path, measured | {"combinations": measured["combinations"][::17]})
    with pytest.raises(UsageError, match="no two differ"):
        fusion_ablation.read_ablation(path)


def test_an_older_study_without_fused_adamw_is_still_read(tmp_path):
    measured, path = made_up(), tmp_path / "fusion_ablation.json"
    kept = [row for row in measured["combinations"] if not row["fusions"].pop("fused_adamw")]
    write_json(path, measured | {"combinations": kept})
    text = fusion_ablation.render_ablation(path).terminal()
    assert "QKV + flash + SwiGLU + compile" in text and "AdamW" not in text
