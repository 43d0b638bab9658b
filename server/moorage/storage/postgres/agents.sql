-- Statements on agents and their joining tokens, each a document under its key.

-- name: rows
SELECT key, document FROM agent ORDER BY key

-- name: put
INSERT INTO agent VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET document = excluded.document

-- name: delete
DELETE FROM agent WHERE key = %s
