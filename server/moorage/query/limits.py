"""Every limit of a query; a query beyond a limit is refused with `too_large`."""

from typing import Final

DEPTH_MAX: Final = 16
"""Nesting depth of logical operators, and of objects and lists in a value."""
CONDITIONS_MAX: Final = 256
"""Conditions of one query, over all levels."""
PATHS_MAX: Final = 32
"""Different paths of one query; each may cost a pass over all documents, once."""
VALUES_MAX: Final = 20_000
"""Values to compare with in one query; list elements count one by one."""
TEXT_CHARS_MAX: Final = 4096
"""Characters of a text in a query."""
PATH_CHARS_MAX: Final = 256
PATH_PARTS_MAX: Final = 16
PATTERN_CHARS_MAX: Final = 256
"""Characters of a LIKE or a `$regex`."""
EXPRESSIONS_MAX: Final = 8
"""`$regex` conditions of one query."""
EXPRESSION_WORK_MAX: Final = 20_000
"""Steps to turn one `$regex` into its table, some milliseconds."""
EXPRESSION_NODES_MAX: Final = 400
"""Nodes of a `$regex` after its repetitions are written out."""
EXPRESSION_TEXT_CHARS_MAX: Final = 4096
"""Longest text that a `$regex` can match."""
SEARCH_CHARS_MAX: Final = 1_000_000
"""Characters that the `$regex` conditions of one search may read over all documents."""
STAGES_MAX: Final = 16
"""Stages of one aggregation pipeline."""
ROWS_MAX: Final = 250_000
"""Documents after each stage of a pipeline."""
RETURN_MAX: Final = 1000
"""Most results of one similarity search."""
WEIGHTS_MAX: Final = 32
"""Paths that a similarity search compares."""
COLUMNS_MAX: Final = 64
"""Columns of an index; beyond it the least recently used one is dropped."""
CELLS_MAX: Final = 8_000_000
"""Values in all columns of an index, 12 bytes each."""
