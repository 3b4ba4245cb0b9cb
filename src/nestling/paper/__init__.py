"""The paper executed; nothing that users of the library call imports it.

- `nestling.paper.exhibits`: equations as plain functions, beside the closed forms the library runs;
- `nestling.paper.nested`: nested systems that run (Eq. 19-28, 98-99);
- `nestling.paper.registry`: the index equation -> symbol -> test.
"""
