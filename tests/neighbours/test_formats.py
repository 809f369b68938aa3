"""Our exports, read by the packages whose formats they are in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodied_rl.episodes.formats import write_foreign
from tests.episodes.episode_toys import make_episode
from tests.episodes.formats.samples import STATE, info_of, record
from tests.neighbours.overlay import overlay, run_with

pytestmark = pytest.mark.slow

MINARI_PROGRAM = """
import json, os, sys, warnings
os.environ["MINARI_DATASETS_PATH"] = sys.argv[1]
warnings.simplefilter("error", UserWarning)
import minari
found = minari.list_local_datasets()
print(json.dumps({name: [minari.load_dataset(name).total_episodes, minari.load_dataset(name).total_steps] for name in found}))
"""


def test_minari_lists_and_loads_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "minari"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    with record(tmp_path / "native", info_of(STATE), [make_episode(STATE, seed, 3 + seed) for seed in range(2)]) as source:
        for name in ("push-v0", "ours/deep/push-v3"):
            write_foreign(source, root / name, "minari")
    told = run_with(overlay("minari==0.5.4"), MINARI_PROGRAM, str(root))
    assert json.loads(told) == {"ours/deep/push-v3": [2, 7], "push-v0": [2, 7]}


ROBOMIMIC_PROGRAM = """
import json, sys
from robomimic.utils import obs_utils
from robomimic.utils.dataset import SequenceDataset
obs_utils.initialize_obs_utils_with_obs_specs([{"obs": {"low_dim": ["state"], "rgb": []}}])
lengths = {}
for mask in ("train", "valid"):
    loaded = SequenceDataset(hdf5_path=sys.argv[1], obs_keys=("state",), dataset_keys=("actions", "rewards", "dones"), frame_stack=1,
                             seq_length=1, pad_frame_stack=True, pad_seq_length=True, hdf5_cache_mode=None, hdf5_use_swmr=False,
                             load_next_obs=True, filter_by_attribute=mask)
    lengths[mask] = [len(loaded), float(loaded[0]["actions"].sum())]
print(json.dumps(lengths))
"""


def test_robomimics_loader_takes_both_masks(tmp_path: Path) -> None:
    episodes = [make_episode(STATE, seed, 3 + seed) for seed in range(3)]
    with record(tmp_path / "native", info_of(STATE), episodes) as source:
        write_foreign(source, tmp_path / "there", "robomimic")
    told = run_with(overlay("robomimic==0.3.0"), ROBOMIMIC_PROGRAM, str(tmp_path / "there" / "demos.hdf5"))
    train, valid = (float(episodes[number].action[0].sum()) for number in (0, 2))
    assert json.loads(told.splitlines()[-1]) == {"train": [3 + 4, pytest.approx(train)], "valid": [5, pytest.approx(valid)]}
