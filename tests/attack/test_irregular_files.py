"""Files that are none: `import` and `--config` neither wait for them nor read them without end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from criuctl.config import Config, text_of
from criuctl.errors import ConfigError, CriuctlError, UnsupportedFormat, UntrustedPath, UsageError
from criuctl.ops.transfer import import_
from criuctl.report import Reporter


def irregular(folder: Path, kind: str) -> Path:
    path = folder / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        return Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero" if kind == "link" else "/etc/hostname")
    return path


@pytest.mark.parametrize("kind", ["fifo", "device", "link", "link-to-file"])
def test_import_of_what_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UsageError, match=r"no regular file|a link"):
        import_(
            Config(state_dir=str(tmp_path), store=str(tmp_path / "store")),
            irregular(tmp_path, kind),
            reporter=Reporter(),
        )


@pytest.mark.parametrize("name", ["x", "link/x", "link/../y/x"])
def test_import_through_a_link_of_another_user(tmp_path: Path, name: str) -> None:
    """A user who may change a folder above the file does not choose what root reads."""
    secret, folder = tmp_path / "root" / "secret", tmp_path / "user"
    for place in (secret, folder, tmp_path / "y"):
        place.mkdir(parents=True)
        (place / "x").write_bytes(bytes(64))
    (folder / "link").symlink_to(secret)
    os.lchown(folder / "link", 65534, 65534)
    os.chown(folder, 65534, 65534)
    reached = UnsupportedFormat if name == "x" else UntrustedPath
    with pytest.raises(reached):
        import_(
            Config(state_dir=str(tmp_path), store=str(tmp_path / "store")),
            folder / name,
            reporter=Reporter(),
        )


def test_import_of_a_pipe_without_a_checkpoint_takes_no_memory(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, bytes(4096))  # and its writer stays
    with pytest.raises(UnsupportedFormat, match="standard input"):
        import_(
            Config(state_dir=str(tmp_path), store=str(tmp_path / "store")),
            reading,
            reporter=Reporter(),
        )
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_a_configuration_that_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CriuctlError) as caught:
        text_of(irregular(tmp_path, kind))
    assert isinstance(caught.value, ConfigError)
