"""A process of a job on several GPUs: `python -m fusedvit.corpus.worker JOB`, started by `job.run`.

Shard numbers come on standard input, a line each, when the process asks for them; a negative one, or the end, ends it.
Messages go to standard output, a JSON document a line: {"next": true}, {"done": {...}}, {"error": "..."}.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from fusedvit.corpus.embedder import embedder_of
from fusedvit.corpus.inputs import collect
from fusedvit.corpus.job import Job, shards_of, work
from fusedvit.errors import InputError, UnsupportedModel, first_line


def main() -> int:
    """Does shards until it is told none."""
    job = Job(**json.loads(sys.argv[1]))
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints does not speak to the parent

    def say(**message: object) -> None:
        said.write(json.dumps(message) + "\n")

    def numbers() -> Iterator[int]:
        while True:
            say(next=True)
            line = sys.stdin.readline()
            if not line or int(line) < 0:
                return
            yield int(line)

    try:
        parts = shards_of(collect(job.given), job.shard_size)
        work(embedder_of(job), parts, Path(job.out), numbers(), lambda shard: say(done=asdict(shard)))
    except (InputError, UnsupportedModel) as error:
        say(error=first_line(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
