"""Pictures of recorded episodes: mp4 with incremental writing and random access, and PNG."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from embodied_rl.errors import UserError, brief
from embodied_rl.files import cannot_write
from embodied_rl.reading import open_regular

if TYPE_CHECKING:
    from av import VideoFrame


DEFAULT_FPS = 10
"""Frame rate if the simulator does not state its control frequency."""
GROUP_OF_PICTURES = 16
"""Number of pictures between key frames: finding a picture decodes at most these. Fewer would be slightly faster to find, for larger files
that take longer to write."""
_LOSSY = {"crf": "18", "preset": "ultrafast", "bf": "0", "g": str(GROUP_OF_PICTURES)}
_LOSSLESS = {"qp": "0", "preset": "ultrafast", "tune": "zerolatency", "g": str(GROUP_OF_PICTURES)}


def frame_rate(control_hz: float | None) -> int:
    """Frames per second of a recording's videos, from its simulator's control frequency."""
    return max(1, round(control_hz or DEFAULT_FPS))


class VideoError(ValueError):
    """A video that cannot be decoded or has unexpected contents; the reader adds its location."""


class VideoWriter:
    """Encodes pictures [H, W, 3] uint8 of one size incrementally into an mp4 file.

    Lossless is H.264 in RGB, which decodes to the same bytes (PyAV, ffmpeg, OpenCV and VLC play it, browsers do not). Otherwise H.264 in
    yuv420p with a constant rate factor of 18, which everything plays: colours at half the resolution, edges a little soft; odd sides become
    even by repeating the last line.
    """

    def __init__(self, path: Path, height: int, width: int, fps: int, lossless: bool) -> None:
        import av

        self.path, self.count = path, 0
        self._failure: UserError | None = None
        self.shape = (height, width, 3) if lossless else (height + height % 2, width + width % 2, 3)
        """Shape of the encoded pictures."""
        with self._writing():
            self._container = av.open(str(path), "w", format="mp4")
        stream = self._container.add_stream("libx264rgb" if lossless else "libx264", rate=fps, options=_LOSSLESS if lossless else _LOSSY)
        stream.height, stream.width = self.shape[:2]
        stream.pix_fmt = "rgb24" if lossless else "yuv420p"
        # Encoder threads would compete with the simulators for cores, and each delays pictures.
        stream.codec_context.thread_count = 1
        self._stream = stream

    def add(self, picture: np.ndarray) -> None:
        room = PictureRoom(self.shape)
        room.fill(picture)
        self.encode(room)

    def encode(self, room: PictureRoom) -> None:
        """Encode the picture in a room, which is free afterwards. Raises UserError if the file cannot be written."""
        room.frame.pts = self.count
        self.count += 1
        with self._writing():
            self._container.mux(self._stream.encode(room.frame))

    def close(self) -> None:
        """Write the remaining data; the file is readable from here on. Raises UserError if it cannot be written."""
        with self._writing():
            if self.count:
                self._container.mux(self._stream.encode())
            self._container.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        import av

        if self._failure is not None:  # libav would crash
            raise self._failure
        try:
            yield
        except (OSError, av.FFmpegError) as error:
            self._failure = cannot_write(self.path, error if isinstance(error, OSError) else OSError(error.errno, error.strerror))
            raise self._failure from error

    def discard(self) -> None:
        try:
            self.close()
        finally:
            self.path.unlink(missing_ok=True)


class PictureRoom:
    """Reusable memory for a picture on its way into a video: allocating costs as much as the copy."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        import av

        self.array = np.empty(shape, np.uint8)
        # A view: the frame shares the array's memory.
        self.frame = av.VideoFrame.from_numpy_buffer(self.array, format="rgb24")

    def fill(self, picture: np.ndarray) -> None:
        """Copy a picture [H, W, 3] uint8; if it is smaller, the last row and column are repeated."""
        height, width = picture.shape[:2]
        self.array[:height, :width] = picture
        if (height, width) != self.array.shape[:2]:
            self.array[height:, :width] = picture[-1]
            self.array[:, width:] = self.array[:, width - 1 : width]


class VideoReader:
    """Reads pictures of a video by number or by time; decodes consecutive ones without seeking."""

    def __init__(self, path: Path, shape: tuple[int, ...], count: int | None = None, fps: float | None = None) -> None:
        """
        Args:
            shape: [H, W, 3] of a picture.
            count: number of pictures in a file of a `VideoWriter`; None: a file of another program.
            fps: pictures per second; None: as the file says.

        Raises VideoError: the file is no video, or one of a `VideoWriter` with other pictures.
        """
        import av
        from av.video.reformatter import VideoReformatter

        self._shape = shape
        try:
            open_regular(path).close()
            # Our header describes the stream: nothing needs to be decoded for that.
            self._container = av.open(str(path), options={} if count is None else {"analyzeduration": "0", "probesize": "32"})
            self._stream = stream = self._container.streams.video[0]
            sides = stream.height, stream.width  # a stream without a known codec has none
        except (av.FFmpegError, OSError, ValueError, IndexError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            reason = "there is no decoder for its codec" if isinstance(error, AttributeError) else reason
            raise VideoError(f"cannot be opened as a video ({brief(reason or error)})") from error
        rate = fps or stream.average_rate
        if rate is None or stream.time_base is None:
            raise VideoError("does not say when its pictures are shown")
        if count is not None:
            even = tuple(side + side % 2 for side in shape[:2])
            if sides not in (shape[:2], even):
                raise VideoError(f"holds pictures of {sides[0]} × {sides[1]}, not {shape[0]} × {shape[1]}")
            if stream.frames < count:
                raise VideoError(f"holds {stream.frames} pictures instead of {count}")
            # Low latency for one picture matters, not throughput.
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1
        self._time_base, self._each_s = stream.time_base, float(1 / rate)
        self._last_s = -np.inf
        self._frames: Iterator[VideoFrame] = iter(())
        # One for all pictures, in this thread: otherwise each frame would create its own.
        self._reformatter = VideoReformatter()

    def read(self, number: int) -> np.ndarray:
        """Decode picture [H, W, 3] uint8. Raises VideoError."""
        return self.at(number * self._each_s)

    def at(self, second: float) -> np.ndarray:
        """Decode the picture [H, W, 3] uint8 at a second of the file. Raises VideoError."""
        import av

        before_s, self._last_s = self._last_s, -np.inf  # unless the picture is found
        try:
            if not before_s + self._each_s / 2 < second <= before_s + GROUP_OF_PICTURES * self._each_s:
                self._container.seek(max(0, round(second / self._time_base)), stream=self._stream)
                self._frames = self._container.decode(self._stream)
            for frame in self._frames:
                if frame.time is None:
                    raise ValueError("a picture without a time")
                if abs(frame.time - second) < self._each_s / 2:
                    self._last_s = frame.time
                    return self._array(frame)
                if frame.time > second:
                    break
        except (av.FFmpegError, OSError, ValueError, TypeError, OverflowError) as error:
            raise VideoError(f"cannot be decoded at {second:.3f} s ({brief(error)})") from error
        raise VideoError(f"has no picture at {second:.3f} s")

    def _array(self, frame: VideoFrame) -> np.ndarray:
        picture = self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
        height, width = self._shape[:2]
        # One extra line if the writer made odd sides even.
        if picture.shape[0] - height not in (0, 1) or picture.shape[1] - width not in (0, 1):
            raise ValueError(f"a picture of {picture.shape[0]} × {picture.shape[1]} instead of {height} × {width}")
        return picture if picture.shape == self._shape else np.ascontiguousarray(picture[:height, :width])

    def close(self) -> None:
        self._frames = iter(())
        self._container.close()


def encode_png(picture: np.ndarray) -> bytes:
    """Encode a picture [H, W, 3] uint8 as PNG bytes, without loss."""
    from PIL import Image

    buffer = io.BytesIO()
    # Level 1 is three times as fast as the default, for a tenth more bytes.
    Image.fromarray(picture).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def decode_picture(data: bytes, shape: tuple[int, ...], formats: list[str]) -> np.ndarray:
    """Decode a picture file in one of PIL's `formats` to uint8 of `shape`: [H, W, 3], or [H, W] grey.
    Raises VideoError if the bytes are no picture of this height and width."""
    from PIL import Image

    mode = "L" if len(shape) == 2 else "RGB"
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            # Checked before memory is allocated for it.
            if (image.height, image.width) != shape[:2]:
                raise ValueError(f"it has {image.height} × {image.width} pixels")
            return np.asarray(image if image.mode == mode else image.convert(mode))
    except (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError) as error:
        raise VideoError(f"has no picture of {list(shape)} ({brief(error)})") from error


_Index = int | np.integer | slice | Sequence[int] | np.ndarray | EllipsisType | None


class Frames:
    """Read-only [T + 1, H, W, 3] uint8, indexed like an array by its first axis; `np.asarray` decodes all."""

    dtype = np.dtype(np.uint8)

    def __init__(
        self, count: int, shape: tuple[int, ...], read: Callable[[int], np.ndarray], video: tuple[Path, str] | None = None
    ) -> None:
        self.shape, self.video = (count, *shape), video
        """`video`: file that contains exactly these pictures, and its encoding."""
        self._read = read

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Size of the decoded pictures."""
        return self.size

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self._read(number) for number in range(len(self)))

    def __getitem__(self, key: _Index | tuple[_Index, ...]) -> np.ndarray:
        first, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        if isinstance(first, int | np.integer):
            number = int(first) + len(self) if first < 0 else int(first)
            if not 0 <= number < len(self):
                raise IndexError(f"There are {len(self)} pictures, no picture {int(first)}.")
            picture = self._read(number)
            return picture[rest] if rest else picture
        if first is Ellipsis or first is None:
            return np.asarray(self)[key]
        numbers = np.arange(len(self))[first]
        pictures = np.empty((len(numbers), *self.shape[1:]), np.uint8)
        for position, number in enumerate(numbers):
            pictures[position] = self._read(int(number))
        return pictures[(slice(None), *rest)] if rest else pictures

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("Pictures are decoded, which makes a copy.")
        return self[:].astype(dtype or np.uint8, copy=False)
