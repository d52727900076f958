"""PTX text, as Triton hands it to the assembler, read into instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_$%][\w$]*")


@dataclass(frozen=True)
class Instruction:
    """`@guard op operands;`. Names of inline assembly's own registers and labels are made unique (`at@3`)."""

    op: str
    operands: tuple[str, ...]
    guard: str = ""  # a predicate register
    negated: bool = False

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"{guard}{self.op} {', '.join(self.operands)}"


@dataclass
class Program:
    """One kernel.

    Attributes:
        params: (name, type) of each, where the 128 bytes of a tensor map have the type "b8".
        kinds: type of each register declared by itself; of families (`%r<99>`) by their prefix.
        labels: index of the instruction behind each.
        targets: labels of each `.branchtargets` list.
        threads: of a CTA.
    """

    params: list[tuple[str, str]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    targets: dict[str, list[str]] = field(default_factory=dict)
    threads: int = 0

    def kind(self, register: str) -> str:
        """Type of a register, or "" of what is none."""
        return self.kinds.get(register) or self.kinds.get(register.rstrip("0123456789"), "")


def parse(text: str) -> Program:
    """The first kernel of `text`.

    Raises:
        ValueError: there is none.
    """
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*\.(loc|file)\b[^\n]*", "", text, flags=re.MULTILINE)
    found = re.search(r"\.entry\s+\w+\s*\((.*?)\)(.*?)\{", text, re.DOTALL)
    if found is None:
        raise ValueError("expected PTX with a kernel (.entry), got none")
    program = Program()
    program.params = [(name, kind) for kind, name in re.findall(r"\.(\w+)\s+(\w+_param_\d+)", _flat(found.group(1)))]
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", found.group(2))
    program.threads = int(threads.group(1)) if threads else 0
    for statement, scope in _statements(text[found.end() - 1 :]):
        _read(program, statement, scope)
    return program


def _flat(params: str) -> str:
    """Without what stands between a parameter's type and its name."""
    params = re.sub(r"\.(ptr|global|const|align\s+\d+)\b\s*", "", params)
    return params.replace(".param", "")


def _statements(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Everything between semicolons, and the scopes that it stands in; labels with their colon."""
    scopes: list[int] = []
    opened = at = 0
    while at < len(text):
        rest = re.compile(r"\s*").match(text, at)
        at = rest.end() if rest else at
        if text[at : at + 1] == "{":
            opened += 1
            scopes.append(opened)
            at += 1
        elif text[at : at + 1] == "}":
            scopes.pop()
            at += 1
            if not scopes:
                return
        elif label := re.compile(r"[\w$]+\s*:").match(text, at):
            yield label.group(), tuple(scopes)
            at = label.end()
        else:
            end = text.find(";", at)
            yield text[at:end].strip(), tuple(scopes)
            at = end + 1


def _read(program: Program, statement: str, scope: tuple[int, ...]) -> None:
    if statement.startswith(".reg"):
        _, kind, names = statement.split(None, 2)
        for name in names.split(","):
            family = re.fullmatch(r"\s*(%\w+?)<\d+>\s*", name)
            plain = name.strip()
            program.kinds[family.group(1) if family else _scoped(plain, scope[-1], len(scope))] = kind[1:]
    elif statement.startswith(("$L__tmp", "$L__func")):
        pass  # for debuggers
    elif statement.endswith(":"):
        program.labels[_scoped(statement[:-1].strip(), scope[-1], len(scope))] = len(program.instructions)
    elif ".branchtargets" in statement:
        names = statement.partition(".branchtargets")[2].split(",")
        program.targets[next(reversed(program.labels))] = [name.strip() for name in names]
    elif statement and not statement.startswith("."):
        program.instructions.append(_instruction(program, statement, scope))


def _scoped(name: str, scope: int, depth: int) -> str:
    """Registers and labels of the kernel itself keep their names."""
    return name if depth == 1 or name.startswith(("%", "$")) else f"{name}@{scope}"


def _instruction(program: Program, statement: str, scope: tuple[int, ...]) -> Instruction:
    def known(match: re.Match[str]) -> str:
        name = match.group()
        for inner in reversed(scope[1:]):
            if f"{name}@{inner}" in program.kinds or name == "waitLoop":
                return f"{name}@{inner}"
        return name

    guard = re.match(r"@(!?)([\w%$]+)\s+", statement)
    body = statement[guard.end() :] if guard else statement
    op, _, rest = body.replace("\t", " ").replace("\n", " ").partition(" ")
    operands = tuple(_NAME.sub(known, part) for part in _split(rest))
    if guard is None:
        return Instruction(op, operands)
    return Instruction(op, operands, _NAME.sub(known, guard.group(2)), bool(guard.group(1)))


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]
