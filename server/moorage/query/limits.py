"""Every limit of a query; a query beyond a limit is refused with `too_large`."""

from typing import Final

DEPTH_MAX: Final = 16
"""Maximum levels of nested logical operators, and of objects and lists in a value."""
CONDITIONS_MAX: Final = 256
"""Maximum conditions of one query, over all levels."""
PATHS_MAX: Final = 32
"""Maximum different paths of one query; each may cost one pass over all documents."""
VALUES_MAX: Final = 20_000
"""Maximum values to compare with in one query; list elements count one by one."""
TEXT_CHARS_MAX: Final = 4096
"""Maximum characters of a text in a query."""
PATH_CHARS_MAX: Final = 256
PATH_PARTS_MAX: Final = 16
PATTERN_CHARS_MAX: Final = 256
"""Maximum characters of a LIKE or a `$regex`."""
EXPRESSIONS_MAX: Final = 8
"""Maximum `$regex` conditions of one query."""
EXPRESSION_WORK_MAX: Final = 20_000
"""Maximum steps to turn one `$regex` into its table; they take some milliseconds."""
EXPRESSION_NODES_MAX: Final = 400
"""Maximum nodes of a `$regex` after its repetitions are written out."""
EXPRESSION_TEXT_CHARS_MAX: Final = 4096
"""Maximum characters of a text that a `$regex` can match."""
SEARCH_CHARS_MAX: Final = 1_000_000
"""Maximum characters that the `$regex` conditions of one search may read in all documents."""
STAGES_MAX: Final = 16
"""Maximum stages of one aggregation pipeline."""
ROWS_MAX: Final = 250_000
"""Maximum documents after each stage of a pipeline."""
RETURN_MAX: Final = 1000
"""Maximum results of one similarity search."""
WEIGHTS_MAX: Final = 32
"""Maximum paths that a similarity search compares."""
COLUMNS_MAX: Final = 64
"""Maximum columns of an index; then the least recently used one is dropped."""
CELLS_MAX: Final = 8_000_000
"""Maximum values in all columns of an index, 12 bytes each."""
