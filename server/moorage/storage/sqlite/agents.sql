-- Agents and their joining tokens, each a document under its key, and every statement on them.

-- name: schema
CREATE TABLE IF NOT EXISTS agents (key TEXT PRIMARY KEY, document BLOB NOT NULL) STRICT

-- name: rows
SELECT key, document FROM agents ORDER BY key

-- name: put
INSERT OR REPLACE INTO agents VALUES (?, ?)

-- name: delete
DELETE FROM agents WHERE key = ?
