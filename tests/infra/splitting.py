"""What is written to a node, in chunks."""

from __future__ import annotations

from rollouts.infra.chunks import CHUNK_BYTES, Chunk


def chunks_of(content: bytes, *, name: str = "file", piece_bytes: int = 999_999) -> list[Chunk]:
    """The chunks of a file, each in pieces of an odd size."""
    chunks = []
    for number, start in enumerate(range(0, len(content), CHUNK_BYTES)):
        chunk = content[start : start + CHUNK_BYTES]
        chunks.append(Chunk(name, number, [chunk[at : at + piece_bytes] for at in range(0, len(chunk), piece_bytes)]))
    return chunks
