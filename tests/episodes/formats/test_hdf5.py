"""HDF5 files that reach outside of themselves, or hold what only code could make sense of, are refused."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from embodied_rl.episodes.formats import hdf5
from embodied_rl.episodes.formats.hdf5 import H5File, write_array
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.errors import MissingExtraError


class Exploit:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.mark,)


def references(file: h5py.File, _: Path) -> None:
    file["other"] = np.arange(3)
    file.create_dataset("x", data=[file["other"].ref] * 3, dtype=h5py.ref_dtype)


def regions(file: h5py.File, _: Path) -> None:
    file["other"] = np.arange(3)
    file.create_dataset("x", data=[file["other"].regionref[:2]], dtype=h5py.regionref_dtype)


def references_in_rows(file: h5py.File, _: Path) -> None:
    file["other"] = np.arange(3)
    data = file.create_dataset("x", (1,), dtype=h5py.vlen_dtype(h5py.ref_dtype))
    data[0] = np.array([file["other"].ref], dtype=h5py.ref_dtype)


def external_link(file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "secret.h5", "w") as other:
        other["x"] = np.arange(3)
    file["x"] = h5py.ExternalLink("secret.h5", "/x")


def soft_link(file: h5py.File, _: Path) -> None:
    file["other"] = np.arange(3)
    file["x"] = h5py.SoftLink("/other")


def dangling_link(file: h5py.File, _: Path) -> None:
    file["x"] = h5py.SoftLink("/nowhere")


def external_data(file: h5py.File, folder: Path) -> None:
    (folder / "secret.bin").write_bytes(np.arange(3).tobytes())
    file.create_dataset("x", (3,), dtype=np.int64, external=[(str(folder / "secret.bin"), 0, 24)])


def virtual_data(file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "secret.h5", "w") as other:
        other["x"] = np.arange(3)
    layout = h5py.VirtualLayout((3,), np.int64)
    layout[:] = h5py.VirtualSource(str(folder / "secret.h5"), "x", (3,))
    file.create_virtual_dataset("x", layout)


def compound(file: h5py.File, _: Path) -> None:
    file["x"] = np.zeros(3, [("a", np.int64), ("b", np.float32)])


def opaque_pickle(file: h5py.File, folder: Path) -> None:
    file["x"] = np.void(pickle.dumps(Exploit(folder / "exploited")))


def texts(file: h5py.File, _: Path) -> None:
    file.create_dataset("x", data=["a", "b"], dtype=h5py.string_dtype())


def empty(file: h5py.File, _: Path) -> None:
    file["x"] = h5py.Empty("f")


def enormous(file: h5py.File, _: Path) -> None:
    # Costs nothing on the disk: no chunk is written.
    file.create_dataset("x", (2**45,), dtype=np.float32, chunks=(1024,))


def a_little_below_the_old_limit(file: h5py.File, _: Path) -> None:
    # 29.8 GiB in a file of a few kilobytes.
    file.create_dataset("x", (8 * 10**9,), dtype=np.float32, chunks=(1024,))


def chunk_of_a_gigabyte(file: h5py.File, _: Path) -> None:
    file.create_dataset("x", (2,), dtype=np.float32, chunks=(2**28,), maxshape=(None,))


def packed_twice(file: h5py.File, _: Path) -> None:
    # Deflated, and deflated again: a thousand times a thousand.
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk((2**27,))
    made.set_deflate(9)
    made.set_deflate(9)
    space = h5py.h5s.create_simple((2**27,))
    h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, space, made)
    file["x"][:] = np.zeros(2**27, np.uint8)


def group(file: h5py.File, _: Path) -> None:
    file.create_group("x")


def scalar(file: h5py.File, _: Path) -> None:
    file["x"] = 1.0


REFUSED = {
    references: "holds objects or references, which are not read",
    regions: "holds objects or references, which are not read",
    references_in_rows: "holds objects or references, which are not read",
    external_link: "is a link to somewhere else, which is not followed",
    soft_link: "is a link to somewhere else, which is not followed",
    dangling_link: "is a link to somewhere else, which is not followed",
    external_data: "keeps its data in another file, which is not followed",
    virtual_data: "keeps its data in another file, which is not followed",
    compound: "must hold numbers, holds",
    opaque_pickle: "must hold numbers, holds",
    texts: "must hold numbers, holds object",
    empty: "claims None values: it is empty",
    enormous: r"claims \[35184372088832\] values of float32, 140,737,488,355,328 bytes, and has 0 in the file",
    a_little_below_the_old_limit: "32,000,000,000 bytes, and has 0 in the file",
    chunk_of_a_gigabyte: "1,073,741,824 bytes, and has 0 in the file",
    packed_twice: r"134,217,728 bytes, and has [\d,]+ in the file",
    group: "must be a dataset, is a group",
    scalar: "must have a row per step, is a single number",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_is_no_plain_array_of_numbers_is_refused(make: Callable[[h5py.File, Path], None], tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file, tmp_path)
    opened = H5File(tmp_path / "x.h5")
    with pytest.raises(RecordingError, match=rf"x\.h5', episode 4, field '/x': .*{REFUSED[make]}"):
        opened.array(opened.root, "x", 4)
    opened.close()
    assert not (tmp_path / "exploited").exists()


def test_zeros_that_are_packed_well_are_read(tmp_path: Path) -> None:
    """The bound is above what a single deflate reaches, and the blocks are put together as the rows were."""
    rows = np.zeros((40, 2**20), np.uint8)
    rows[:, 0] = np.arange(40)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=(1, 2**20), compression="gzip")
        file.create_dataset("wide", data=rows, chunks=(40, 2**14), compression="gzip", compression_opts=9)
    assert (tmp_path / "x.h5").stat().st_size < 2 * rows.nbytes / 900
    opened = H5File(tmp_path / "x.h5")
    for name in ("x", "wide"):
        np.testing.assert_array_equal(opened.array(opened.root, name), rows)
    opened.close()


def test_a_group_within_itself_and_texts_that_point_to_one_place_end(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        inner = file.create_group("a/b")
        inner["again"] = file["a"]
        texts = file.create_dataset("texts", (3000,), dtype=h5py.string_dtype())
        texts[0] = "x" * 20_000
    # Every row is made to point to where the first text lies.
    with h5py.File(tmp_path / "x.h5", "r") as file:
        offset = file["texts"].id.get_offset()
    data = bytearray((tmp_path / "x.h5").read_bytes())
    data[offset : offset + 16 * 3000] = data[offset : offset + 16] * 3000
    (tmp_path / "x.h5").write_bytes(data)
    opened = H5File(tmp_path / "x.h5")
    with pytest.raises(RecordingError, match=r"field '/a/b/again': is a group that lies within itself"):
        opened.leaves(opened.group(opened.root, "a"))
    with pytest.raises(RecordingError, match=r"field '/texts': holds more than [\d,]+ bytes of text"):
        opened.strings(opened.root, "texts")
    opened.close()


@pytest.mark.parametrize("make", [references, references_in_rows], ids=lambda make: make.__name__)
def test_texts_are_no_way_around(make: Callable[[h5py.File, Path], None], tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file, tmp_path)
        file.attrs["about"] = file["other"].ref
    opened = H5File(tmp_path / "x.h5")
    with pytest.raises(RecordingError, match="holds objects or references"):
        opened.strings(opened.root, "x")
    with pytest.raises(RecordingError, match="'/@about': holds objects or references"):
        opened.attribute(opened.root, "about")
    opened.close()


def test_a_chunk_that_was_altered_is_an_error_and_no_number(tmp_path: Path) -> None:
    path, rows = tmp_path / "x.h5", np.random.default_rng(0).normal(size=(64, 64))
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=rows, chunks=(8, 64), fletcher32=True)
    data = bytearray(path.read_bytes())
    where = bytes(data).index(rows[30].tobytes()[:64])
    data[where] ^= 0xFF
    path.write_bytes(data)
    opened = H5File(path)
    with pytest.raises(RecordingError, match=r"x\.h5', field '/x': cannot be read"):
        opened.array(opened.root, "x")
    opened.close()


def test_a_header_that_was_overwritten_is_no_missing_field(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        header = int(h5py.h5o.get_info(file.create_dataset("x", data=np.arange(3)).id).addr)
    data = bytearray(path.read_bytes())
    data[header : header + 16] = b"\xff" * 16
    path.write_bytes(data)
    opened = H5File(path)
    with pytest.raises(RecordingError, match=r"x\.h5', field '/x': cannot be read: .*[Uu]nable to .*open object") as found:
        opened.array(opened.root, "x")
    assert "no field" not in str(found.value)
    opened.close()


def test_nested_datasets_have_joined_names_in_their_order(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        root = file.create_group("top", track_order=True)
        for name in ("z", "b/two", "b/one", "a"):
            write_array(root, name, np.arange(2))
    opened = H5File(tmp_path / "x.h5")
    assert list(opened.arrays(opened.group(opened.root, "top"), length=2)) == ["z", "b/one", "b/two", "a"], "b itself keeps no order"
    opened.close()


def test_a_missing_package_is_named_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r'Reading and writing HDF5 files needs packages .* pip install "embodied-rl\[formats\]"'):
        hdf5.import_h5py()
