"""The rules of the directory that its state can show, by their numbers in directory.py."""

from __future__ import annotations

from windfall.controller.directory.directory import Directory
from windfall.weights.ranges import covers, normal


def check(directory: Directory) -> None:
    """Raise AssertionError if the state breaks a rule."""
    contacts, files = directory._contacts, directory._files
    holders, usable = contacts.holders, contacts.usable
    for digest, known in files.items():
        importers: list[str] = []
        for reader, reading in known.readings.items():
            me = holders[reader]
            for part in reading.parts:
                assert directory._valid(known, reader, part), (1, part)
                assert part.source not in contacts.dropped, (6, part)
            covered = normal((part.start, part.stop) for part in reading.parts)
            assert not reading.parts or covers(covered, reading.need), (1, reader, digest)
            importing = any(holders[id].across(me) for id in reading.sources)
            for other in importers if importing else ():
                pair = ((reader, other), (other, reader))
                both = all(usable(*ids) and ids[1] not in known.readings[ids[0]].avoid for ids in pair)
                assert holders[other].region != me.region or not both, (3, reader, other)
            if importing:
                importers.append(reader)
        follows = {reader: known.follows(reader) for reader in known.readings}
        while done := [reader for reader, others in follows.items() if not others & follows.keys()]:
            for reader in done:
                del follows[reader]
        assert not follows, (2, follows)
    kept = [id for id, holder in holders.items() if holder.kind != "peer"]
    if directory.newest in files and any(holders[id].kind == "trainer" for id in kept):
        known = files[directory.newest]
        complete = normal(piece for id in kept for piece in known.held.get(id, ()))
        assert covers(complete, normal([(0, known.file.nbytes)])), (8, directory.newest)
