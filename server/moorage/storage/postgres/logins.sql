-- Statements on logins to the console.

-- name: rows
SELECT digest, document FROM login ORDER BY number

-- name: insert
INSERT INTO login(digest, document) VALUES (%s, %s)

-- name: delete
DELETE FROM login WHERE digest = ANY(%s)
