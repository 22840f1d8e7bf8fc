"""Parses the publisher's orders to the admin routes of merged weights (`merged_server.py`)."""

from typing import Any, Literal, NotRequired, TypedDict

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from tandem.errors import InvalidInput, from_validation_error


class Swap(TypedDict):
    """See `VllmClient.swap_merged`."""

    name: str
    path: str
    scale: FiniteFloat
    requests: Literal["keep", "wait"]
    seconds: FiniteFloat
    source: dict[str, Any] | None
    again: dict[str, Any] | None


class Announce(TypedDict):
    path: str


class Revert(TypedDict):
    path: str
    to_base: NotRequired[bool]


class RowsOrder(TypedDict):
    rows: dict[str, int]


_ORDERS: dict[str, TypeAdapter[Any]] = {
    "/swap": TypeAdapter(Swap),
    "/announce": TypeAdapter(Announce),
    "/revert": TypeAdapter(Revert),
    "/rows": TypeAdapter(RowsOrder),
}


def read_order(action: str, body: bytes) -> dict[str, Any]:
    """The order in a request's body. Raises InvalidInput that names the first wrong field."""
    try:
        order: dict[str, Any] = _ORDERS[action].validate_json(body)
    except ValidationError as error:
        refused = from_validation_error(error)
        problem = f"this is no order to {action[1:]}: {refused.message}"
        raise InvalidInput(problem, field=refused.field) from error
    return order
