-- The tables of the ledger, and every statement on them. No statement looks at more rows than it
-- returns: what starting and reading cost does not grow with the history.

-- name: schema
CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO meta VALUES ('format', 1);
INSERT INTO meta VALUES ('pruned', 0);
CREATE TABLE fact(
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, version INTEGER NOT NULL,
    subject TEXT NOT NULL, body TEXT NOT NULL, checksum INTEGER NOT NULL,
    chain INTEGER NOT NULL);
CREATE TABLE lost(first INTEGER PRIMARY KEY, last INTEGER NOT NULL, at REAL NOT NULL);
CREATE INDEX fact_by_subject ON fact(subject);
CREATE TABLE checkpoint(
    number INTEGER PRIMARY KEY, seq INTEGER NOT NULL, parts INTEGER NOT NULL,
    checksum INTEGER NOT NULL);
CREATE TABLE checkpoint_part(
    checkpoint INTEGER NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (checkpoint, number));

-- name: tables
SELECT name FROM sqlite_master

-- name: format
SELECT value FROM meta WHERE name = 'format'

-- name: set_format
UPDATE meta SET value = ? WHERE name = 'format'

-- name: pruned
SELECT value FROM meta WHERE name = 'pruned'

-- name: set_pruned
UPDATE meta SET value = ? WHERE name = 'pruned'

-- name: insert
INSERT INTO fact VALUES

-- name: insert_row
(?,?,?,?,?,CAST(? AS TEXT),?,?)

-- name: first
SELECT coalesce(min(seq), 1) FROM fact

-- name: last
SELECT coalesce(max(seq), 0) FROM fact

-- name: chain
SELECT chain FROM fact WHERE seq = ?

-- name: after
-- A damaged page may say NULL where none can be.
SELECT seq, at, kind, version, subject, CAST(coalesce(body, '') AS BLOB), checksum, chain
FROM fact WHERE seq > ? ORDER BY seq LIMIT ?

-- name: between
SELECT seq, at, kind, version, subject, CAST(coalesce(body, '') AS BLOB), checksum, chain
FROM fact WHERE seq > ? AND seq <= ? ORDER BY seq

-- name: about
SELECT seq, at, kind, version, subject, CAST(coalesce(body, '') AS BLOB), checksum, chain
FROM fact WHERE subject = ? AND seq > ? ORDER BY seq LIMIT ?

-- name: oldest
SELECT seq, at FROM fact WHERE seq < ? ORDER BY seq LIMIT ?

-- name: oldest_at
SELECT at FROM fact ORDER BY seq LIMIT 1

-- name: delete_to
DELETE FROM fact WHERE seq <= ?

-- name: lost
SELECT first, last FROM lost ORDER BY first

-- name: insert_lost
INSERT INTO lost VALUES (?,?,?)

-- name: checkpoints
SELECT number, seq, parts, checksum FROM checkpoint ORDER BY number DESC

-- name: checkpoint_numbers
SELECT max(number) FROM checkpoint UNION SELECT max(checkpoint) FROM checkpoint_part

-- name: parts
SELECT body FROM checkpoint_part WHERE checkpoint = ? ORDER BY number

-- name: insert_part
INSERT INTO checkpoint_part VALUES (?,?,?)

-- name: insert_checkpoint
INSERT INTO checkpoint VALUES (?,?,?,?)

-- name: delete_old_checkpoints
DELETE FROM checkpoint WHERE number NOT IN
(SELECT number FROM checkpoint ORDER BY number DESC LIMIT ?)

-- name: delete_checkpoint
DELETE FROM checkpoint WHERE number = ?

-- name: sweep
DELETE FROM checkpoint_part WHERE rowid IN (SELECT rowid FROM checkpoint_part
WHERE checkpoint NOT IN (SELECT number FROM checkpoint) LIMIT ?)
