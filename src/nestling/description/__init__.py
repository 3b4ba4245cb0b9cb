"""See any model and optimizer as the nested system it is: levels, tables, pictures."""

from nestling.description.describe import describe
from nestling.description.description import Component, Description
from nestling.description.timeline import Timeline

__all__ = ["Component", "Description", "Timeline", "describe"]
