"""The default store: SQLite files in the data folder, and the files beside them."""

from typing import Final

LEDGER_FILE: Final = "ledger.db"
CATALOG_FILE: Final = "catalog.db"
TOKENS_FILE: Final = "tokens.db"
TOKENS_MARK: Final = "tokens.mark"
SECRET_FILE: Final = "lease_secret"  # noqa: S105  # A file's name.
AGENTS_FILE: Final = "agents.db"
LOGINS_FILE: Final = "logins.db"
AUDIT_FOLDER: Final = "audit"
AUDIT_MARK: Final = "audit.mark"
