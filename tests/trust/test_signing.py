"""Signatures are this user's on this machine: made once, private, and of no use to anybody else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from embodied_rl import trust
from embodied_rl.trust import CHECKPOINT, RECORDING, is_signed, sign


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    trust._warn.cache_clear()
    return tmp_path / "state" / "embodied_rl"


def test_a_signature_is_of_its_content_its_kind_and_its_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signature = sign(CHECKPOINT, b"sim: mine")
    assert signature is not None
    assert len(signature) == 64
    assert is_signed(CHECKPOINT, b"sim: mine", signature)
    assert not is_signed(CHECKPOINT, b"sim: yours", signature)
    assert not is_signed(RECORDING, b"sim: mine", signature)
    for forged in (None, "", "0" * 64, signature[:-1], signature.upper() + "é"):
        assert not is_signed(CHECKPOINT, b"sim: mine", forged)
    monkeypatch.setenv("XDG_STATE_HOME", str(home.parent.parent / "somebody else"))
    assert not is_signed(CHECKPOINT, b"sim: mine", signature), "no key yet"
    assert not (home.parent.parent / "somebody else").exists(), "reading makes none"
    assert sign(CHECKPOINT, b"sim: mine") != signature


def test_hmac_is_that_of_the_standard(home: Path) -> None:
    # RFC 2104 written out: H(K ^ opad, H(K ^ ipad, text)), key padded to the block's 64 bytes.
    from hashlib import sha256

    signature, key = sign(CHECKPOINT, b"x"), (home / "key").read_bytes().ljust(64, b"\0")
    inner = sha256(bytes(b ^ 0x36 for b in key) + b"embodied_rl checkpoint 1\nx").digest()
    assert signature == sha256(bytes(b ^ 0x5C for b in key) + inner).hexdigest()


def test_the_key_is_private_and_made_once(home: Path) -> None:
    code = "from embodied_rl.trust import sign; print(sign('checkpoint', b'x'))"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    found = {process.communicate(timeout=60)[0].strip() for process in started}
    assert len(found) == 1, "six processes at once have one key"
    assert found == {sign(CHECKPOINT, b"x")}
    assert stat.S_IMODE((home / "key").stat().st_mode) == 0o600
    assert (home / "key").stat().st_size == 32
    assert os.listdir(home) == ["key"]


def test_a_key_that_others_can_read_or_that_is_a_link_is_not_used(home: Path) -> None:
    signature = sign(CHECKPOINT, b"x")
    (home / "key").chmod(0o644)
    assert not is_signed(CHECKPOINT, b"x", signature)
    with pytest.warns(UserWarning, match="not signed .*mode 0600, and has 0644"):
        assert sign(CHECKPOINT, b"x") is None
    (home / "key").chmod(0o600)
    assert is_signed(CHECKPOINT, b"x", signature)
    (home / "key").rename(home / "elsewhere")
    (home / "key").symlink_to(home / "elsewhere")
    assert not is_signed(CHECKPOINT, b"x", signature)


def test_where_no_key_can_be_kept_a_run_goes_on_with_one_warning(home: Path) -> None:
    home.parent.mkdir()
    home.write_text("in the way", encoding="utf-8")
    with pytest.warns(UserWarning, match="not signed") as told:
        assert [sign(CHECKPOINT, b"x") for _ in range(3)] == [None] * 3
    assert len(told) == 1
    assert not is_signed(CHECKPOINT, b"x", "0" * 64)
