"""A process of a job on several GPUs: `python -m fusedvit.corpus.worker JOB`, started by `job.run`.

The process asks for shard numbers and reads them from standard input, one per line. A negative number ends it after its
work; the end of standard input ends it at once.
Messages go to standard output, one JSON document per line: {"next": true}, {"done": {...}}, {"error": "..."}.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from fusedvit.corpus import shards
from fusedvit.corpus.embedder import embedder_of
from fusedvit.corpus.inputs import collect
from fusedvit.corpus.job import Job, shards_of, work
from fusedvit.errors import InputError, first_line


def main() -> int:
    """Embeds shards until the parent sends a negative number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which ends this process
    job = Job(**json.loads(sys.argv[1]))
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints of other code must not reach the parent

    def say(**message: object) -> None:
        said.write(json.dumps(message) + "\n")

    told: SimpleQueue[int] = SimpleQueue()
    Thread(target=_listen, args=(told,), daemon=True).start()

    def numbers() -> Iterator[int]:
        while True:
            say(next=True)
            number = told.get()
            if number < 0:
                return
            yield number

    try:
        inputs = collect(job.given)
        shards.check(
            Path(job.out), job.document(inputs, job.dtype())
        )  # a folder may have changed since the parent listed it
        parts = shards_of(inputs, job.shard_size)
        work(embedder_of(job), parts, Path(job.out), numbers(), lambda shard: say(done=asdict(shard)))
    except InputError as error:
        say(error=first_line(error))
        return 2
    except BrokenPipeError:
        return 2  # the parent is gone
    return 0


def _listen(told: "SimpleQueue[int]") -> None:
    """Passes on the parent's numbers; ends the process at once when the parent is gone."""
    for line in sys.stdin:
        told.put(int(line))
    os._exit(2)


if __name__ == "__main__":
    sys.exit(main())
