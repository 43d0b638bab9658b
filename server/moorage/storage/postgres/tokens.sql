-- Statements on named tokens. The counter `tokens` changes with each change.

-- name: version
SELECT value FROM meta WHERE name = 'tokens'

-- name: rows
SELECT name, digest, role, tenant, created_at, expires_at, revoked_at FROM token ORDER BY name

-- name: insert
WITH new AS (INSERT INTO token VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
    RETURNING 1)
UPDATE meta SET value = value + 1 FROM new WHERE meta.name = 'tokens'

-- name: has
SELECT 1 FROM token WHERE name = %s

-- name: revoke
WITH gone AS (UPDATE token SET revoked_at = %s WHERE name = %s AND revoked_at IS NULL RETURNING 1)
UPDATE meta SET value = value + 1 FROM gone WHERE meta.name = 'tokens'
