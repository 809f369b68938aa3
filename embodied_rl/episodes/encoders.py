"""Encoders of lossless films that go on from one film to the next.

Opening an encoder takes libx264 as long as a dozen small pictures: its memory is new, and the kernel clears it page by page.
"""

from __future__ import annotations

import io
from typing import Any

LOSSLESS_CODEC, LOSSLESS_FORMAT = "libx264rgb", "rgb24"
GROUP_OF_PICTURES = 16
"""Every so many pictures one stands for itself: a picture is found by decoding at most these. Fewer would be a little quicker to find, for
larger files that take longer to write."""
LOSSLESS = {"qp": "0", "preset": "ultrafast", "tune": "zerolatency", "g": str(GROUP_OF_PICTURES)}
_IDR = b"\0\0\1\x65"
"""Start code and header of an IDR slice (H.264, 7.3.1): what a picture that stands for itself begins with."""


class KeptEncoder:
    """An encoder of lossless pictures of one size, for one film after another.

    A film's file is the same to the bit whatever was encoded before: it begins with an IDR picture, and nothing before one counts for what
    comes after it; the quantiser is constant, so there is no rate control with a memory. The two things that go on are put right here.
    """

    def __init__(self, height: int, width: int, fps: int) -> None:
        import av

        self.key = height, width, fps
        # Nothing is written there: films learn from it what is in the stream.
        self._holder = av.open(io.BytesIO(), "w", format="mp4")
        stream: Any = self._holder.add_stream(LOSSLESS_CODEC, rate=fps, options={**LOSSLESS, "forced-idr": "1"})
        stream.height, stream.width, stream.pix_fmt = height, width, LOSSLESS_FORMAT
        stream.codec_context.thread_count = 1
        self._holder.start_encoding()
        self.stream = stream
        self._num_encoded = self._num_idr = self._num_in_film = 0
        self._prefix = b""

    def begin_film(self) -> None:
        """The next picture is the first one of a film."""
        self._num_in_film = 0

    def encode(self, frame: Any) -> Any:
        """The packet of a picture, in a film that begins at time 0; the frame (`av.VideoFrame`, rgb24) is free again afterwards."""
        begins = self._num_in_film == 0
        if begins and self._num_idr % 2:
            # IDR pictures are called 0 and 1 in turns (idr_pic_id), and the first one of a film is 0: this one is left out.
            self._packet(frame, idr=True)
        packet = self._packet(frame, idr=begins)
        if begins:
            packet = self._with_prefix(packet)
        packet.pts = packet.dts = self._num_in_film
        self._num_in_film += 1
        return packet

    def _packet(self, frame: Any, idr: bool) -> Any:
        from av.video.frame import PictureType

        frame.pts = self._num_encoded
        if idr:
            frame.pict_type = PictureType.I
        (packet,) = self.stream.encode(frame)  # "zerolatency": one comes out for each that goes in
        if idr:
            frame.pict_type = PictureType.NONE
        self._num_encoded += 1
        self._num_idr += packet.is_keyframe
        return packet

    def _with_prefix(self, packet: Any) -> Any:
        """libx264 writes its name before the first picture of all; here every film carries it."""
        import av

        data = bytes(packet)
        start = data.index(_IDR)
        if self._num_idr == 1:
            self._prefix = data[:start]
            return packet
        named = av.Packet(self._prefix + data[start:])
        named.time_base, named.duration, named.is_keyframe = packet.time_base, packet.duration, True
        return named


class KeptEncoders:
    """Those that no film has at the moment: as many of a kind as there were films at once. For one thread."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int, int], list[KeptEncoder]] = {}

    def take(self, height: int, width: int, fps: int) -> KeptEncoder:
        """One whose next picture begins a film; `give_back` is due when the film has ended."""
        free = self._free.get((height, width, fps))
        encoder = free.pop() if free else KeptEncoder(height, width, fps)
        encoder.begin_film()
        return encoder

    def give_back(self, encoder: KeptEncoder) -> None:
        self._free.setdefault(encoder.key, []).append(encoder)
