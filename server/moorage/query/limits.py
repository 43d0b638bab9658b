"""Every limit of a query; a query beyond a limit is refused with `too_large`."""

from typing import Final

DEPTH_MAX: Final = 16
"""Logical operators within each other, and objects or lists within a value."""
CONDITIONS_MAX: Final = 256
"""Conditions of one query, on all levels together."""
PATHS_MAX: Final = 32
"""Different paths of one query; each may cost a pass over all documents, once."""
VALUES_MAX: Final = 20_000
"""Values to compare with in one query, the elements of its lists counted one by one."""
TEXT_CHARS_MAX: Final = 4096
"""Characters of a text in a query."""
PATH_CHARS_MAX: Final = 256
PATH_PARTS_MAX: Final = 16
PATTERN_CHARS_MAX: Final = 256
"""Characters of a LIKE or a `$regex`."""
EXPRESSIONS_MAX: Final = 8
"""`$regex` conditions of one query."""
EXPRESSION_WORK_MAX: Final = 20_000
"""Steps that it may take to turn one `$regex` into its table: some milliseconds."""
EXPRESSION_NODES_MAX: Final = 400
"""Places of a `$regex` once its repetitions are written out."""
EXPRESSION_TEXT_CHARS_MAX: Final = 4096
"""A longer text matches no `$regex`."""
SEARCH_CHARS_MAX: Final = 1_000_000
"""Characters that the `$regex` of one search may read over all documents."""
STAGES_MAX: Final = 16
"""Stages of one aggregation pipeline."""
ROWS_MAX: Final = 250_000
"""Documents after each stage of a pipeline."""
RETURN_MAX: Final = 1000
"""Results of one similarity search."""
WEIGHTS_MAX: Final = 32
"""Paths that a similarity search compares."""
COLUMNS_MAX: Final = 64
"""Columns that an index keeps; the least recently used one makes room."""
CELLS_MAX: Final = 8_000_000
"""Values that the columns of an index keep, together; 12 bytes each."""
