-- Statements on named tokens.

-- name: rows
SELECT name, digest, role, tenant, created_at, expires_at, revoked_at FROM token ORDER BY name

-- name: insert
INSERT INTO token VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING

-- name: has
SELECT 1 FROM token WHERE name = %s

-- name: revoke
UPDATE token SET revoked_at = %s WHERE name = %s AND revoked_at IS NULL
