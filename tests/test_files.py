"""Files on a disk that becomes full, and interrupts, at any place."""

import io
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sortattn.files import load_state, save_state

resource = pytest.importorskip("resource")


@contextmanager
def room_for(size):
    """No file may become larger, which is refused as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_oserror_wherever_it_happens(tmp_path):
    path = tmp_path / "state.pt"
    state = {"weights": torch.arange(2000.0), "names": ["a", "b"], "step": 3}
    save_state(path, state)
    kept, size = path.read_bytes(), path.stat().st_size
    for place in [*range(0, size, 509), *range(size - 300, size, 7)]:
        with pytest.raises(OSError, match="File too large"), room_for(place):
            save_state(path, {**state, "step": 4})
        assert path.read_bytes() == kept
        assert list(tmp_path.iterdir()) == [path]
    with room_for(size):
        save_state(path, {**state, "step": 4})
    assert torch.load(path, weights_only=True)["step"] == 4


class Interrupted(io.FileIO):
    """A file in which somebody presses Ctrl-C at a write."""

    left = 0

    def write(self, data):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().write(data)


def test_an_interrupt_is_an_interrupt_wherever_it_happens(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    state = {"weights": torch.arange(2000.0), "more": [torch.ones(3)] * 3, "step": 3}
    save_state(path, state)
    kept = path.read_bytes()
    monkeypatch.setattr(Path, "open", lambda self, mode, **more: Interrupted(self, mode))
    for place in range(1, 40):
        Interrupted.left = place
        with pytest.raises(KeyboardInterrupt):
            save_state(path, {**state, "step": 4})
        assert path.read_bytes() == kept
        assert list(tmp_path.iterdir()) == [path]
    Interrupted.left = 0
    save_state(path, {**state, "step": 4})


def test_damage_is_noticed_wherever_it_is(tmp_path):
    path = tmp_path / "state.pt"
    save_state(path, {"weights": torch.arange(50.0), "step": 3})
    whole = path.read_bytes()
    assert load_state(path)["step"] == 3
    contents = whole.index(torch.arange(50.0).numpy().tobytes())
    for place in (0, contents, contents + 100, len(whole) - 20):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="checksum|zip|Error"):
            load_state(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="zip"):
        load_state(path)


def test_what_is_no_state_is_refused_and_runs_no_code(tmp_path):
    path = tmp_path / "state.pt"
    for thing, problem in (([1, 2], "holds a list"), (pytest.raises, "Unpickling")):
        torch.save(thing, path)
        with pytest.raises(ValueError, match=problem):
            load_state(path)
    with pytest.raises(ValueError, match="FileNotFound"):
        load_state(tmp_path / "nothing.pt")
