"""Whether a run may continue a job: how their documents (`Job.document`) differ, as a message."""

from typing import Any

_ELSEWHERE = "choose another output folder"
_DIGESTS = {  # the contents of a digest, for messages
    "inputs_digest": "inputs (names or order)",
    "tables_digest": "tables",
    "weights": "checkpoint's weights",
    "config": "checkpoint's config",
    "processor": "processor's settings",
}
_FILES = "files_digest"
_FOR_MESSAGES = ("given",)
_LONGEST = 200  # characters of a value in a message


def difference(known: dict[str, Any], job: dict[str, Any]) -> str:
    """How the document of a begun job, `known`, differs from that of the run that is to continue it; "" if it does not.

    `files_digest` is compared last: other differences say more.
    """
    if known.get("version") != job.get("version"):
        recorded = f"job.json of version {job.get('version')} expected, got {known.get('version') or 'none'}"
        return f"begun by another version of fusedvit: {recorded}; {_ELSEWHERE}"
    for name in sorted((known.keys() | job.keys()).difference(_FOR_MESSAGES), key=lambda name: (name in _FILES, name)):
        was, now = known.get(name, "nothing"), job.get(name, "nothing")
        if was != now:
            return f"holds another job: {_said(name, was, now, known, job)} {_ELSEWHERE}"
    return ""


def _said(name: str, was: Any, now: Any, known: dict[str, Any], job: dict[str, Any]) -> str:
    if name == _FILES:
        begun, given = (str(each.get("given"))[:_LONGEST] for each in (known, job))
        where = f"of {given}" if begun == given else f"begun with {begun}, now {given}"
        return (
            "inputs of the same names are other files, lie elsewhere, or are a table of other content "
            f"({where}); put them back to go on, or"
        )
    if name in _DIGESTS:
        return f"the {_DIGESTS[name]} that it was begun with expected, got others (digest {was}, now {now});"
    return f"{name} was {str(was)[:_LONGEST]} and is {str(now)[:_LONGEST]};"
