"""Files on a disk that becomes full at any place."""

from contextlib import contextmanager

import pytest
import torch

from sortattn.files import save_state

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
