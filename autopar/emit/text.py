"""Source text: parentheses where they are needed; long calls broken at their outermost commas."""

import re
from collections.abc import Iterable

LIMIT = 100


def wrapped(line: str, indent: int) -> list[str]:
    """A statement, indented; over several lines where it is too long for one."""
    indent, line = indent + len(line) - len(line.lstrip()), line.lstrip()
    margin = " " * indent
    if indent + len(line) <= LIMIT or line.startswith("#"):
        return [margin + line]
    comment = ""
    if "  # " in line:
        line, comment = line.split("  # ", 1)
        if indent + len(line) <= LIMIT:
            return [f"{margin}# {comment}", margin + line]
    head, arguments, tail = _outer_call(line)
    if not arguments:
        return [margin + line]
    out = [f"{margin}# {comment}"] if comment else []
    out.append(f"{margin}{head}(")
    together = f"{margin}    {', '.join(arguments)}"
    if len(together) <= LIMIT:
        return [*out, together, f"{margin}){tail}"]
    # A comma after the only operand in plain parentheses would make it a tuple.
    grouping = len(arguments) == 1 and (not head or not (head[-1].isalnum() or head[-1] in "_)]"))
    for argument in arguments:
        out += wrapped(argument if grouping else f"{argument},", indent + 4)
    out.append(f"{margin}){tail}")
    return out


def _outer_call(line: str) -> tuple[str, list[str], str]:
    """Head, arguments and tail of the last outermost parenthesis group of a line."""
    depth, spans, start = 0, [], 0
    for position, character in enumerate(line):
        if character in "([{":
            if depth == 0:
                start = position
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0 and line[start] == "(" and start > 0 and position > start + 1:
                spans.append((start, position))
    longest = max(spans, key=lambda span: span[1] - span[0], default=None)
    if longest is None or any(c in line[longest[0] : longest[1]] for c in ('"""',)):
        return line, [], ""
    start, end = longest
    return line[:start], _split_commas(line[start + 1 : end]), line[end + 1 :]


def _split_commas(text: str) -> list[str]:
    depth, parts, current = 0, [], ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def strings(words: Iterable[str]) -> str:
    """A tuple of string literals."""
    items = tuple(f'"{word}"' for word in words)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def is_primary(text: str) -> bool:
    """Whether a text binds tighter than any operator: a name, number, call, subscript."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in " +-*/@<>=~":
            return False
    return True


def atom(text: str) -> str:
    """The text, in parentheses where an operator beside it could tear it apart."""
    return text if is_primary(text) else f"({text})"


def receiver(text: str) -> str:
    """The text as something that a method can be called on."""
    return f"({text})" if not is_primary(text) or re.fullmatch(r"[\d.]+", text) else text
