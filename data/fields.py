"""Fields of records by their names: a name with dots is of a field inside of others ("doc.text")."""

from typing import Any


def field_value(record: dict[str, Any], name: str) -> Any:
    """The value of a field, or by a name with dots of a field inside of others ("doc.text"); None where one of those is
    null. Raises KeyError when it is not there.
    """
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


def with_field(record: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The record with another value of a field that `field_value` finds."""
    if name in record or "." not in name:
        return record | {name: value}
    first, _, rest = name.partition(".")
    return record | {first: with_field(record[first] or {}, rest, value)}


def text_fields(record: dict[str, Any]) -> list[str]:
    """The names of the fields that hold text, those inside of others with dots."""
    names = []
    for name, value in record.items():
        if isinstance(value, str):
            names.append(name)
        elif isinstance(value, dict):
            names += [f"{name}.{inner}" for inner in text_fields(value)]
    return names
