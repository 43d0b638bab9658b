-- Logins to the console, and every statement on them.

-- name: schema
CREATE TABLE IF NOT EXISTS logins (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    digest TEXT NOT NULL UNIQUE,
    document BLOB NOT NULL
) STRICT

-- name: rows
SELECT digest, document FROM logins ORDER BY number

-- name: insert
INSERT INTO logins(digest, document) VALUES (?, ?)

-- name: delete
DELETE FROM logins WHERE digest = ?
