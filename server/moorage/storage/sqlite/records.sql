-- The tables of the catalog, and every statement on them.

-- name: schema
CREATE TABLE records (
    kind TEXT NOT NULL, id TEXT NOT NULL, document BLOB NOT NULL, files BLOB NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY (kind, id)
);
CREATE TABLE damaged (kind, id, document, files, checksum, why TEXT NOT NULL);
CREATE TABLE commits (number INTEGER NOT NULL);
INSERT INTO commits VALUES (0);
-- `usage` follows `records` by triggers, so that limits are checked in the transaction that would
-- break them, without counting rows, and that a record cannot go missing without a word.
CREATE TABLE usage (
    kind TEXT PRIMARY KEY, records INTEGER NOT NULL, bytes INTEGER NOT NULL,
    checksums INTEGER NOT NULL
);
INSERT INTO usage VALUES
    ('cluster', 0, 0, 0), ('metrics', 0, 0, 0), ('policy', 0, 0, 0), ('alias', 0, 0, 0),
    ('context', 0, 0, 0), ('executor', 0, 0, 0), ('history', 0, 0, 0), ('block', 0, 0, 0),
    ('block_metrics', 0, 0, 0);
CREATE TRIGGER record_added AFTER INSERT ON records BEGIN
    UPDATE usage SET records = records + 1, checksums = checksums + new.checksum,
        bytes = bytes + length(new.document) + length(new.files) WHERE kind = new.kind;
END;
CREATE TRIGGER record_changed AFTER UPDATE ON records BEGIN
    UPDATE usage SET checksums = checksums + new.checksum - old.checksum,
        bytes = bytes + length(new.document) + length(new.files)
        - length(old.document) - length(old.files) WHERE kind = new.kind;
END;
CREATE TRIGGER record_removed AFTER DELETE ON records BEGIN
    UPDATE usage SET records = records - 1, checksums = checksums - old.checksum,
        bytes = bytes - length(old.document) - length(old.files) WHERE kind = old.kind;
END;

-- name: commits
SELECT number FROM commits

-- name: count_commit
UPDATE commits SET number = number + 1

-- name: set_commits
UPDATE commits SET number = ?

-- name: get
SELECT id, document, files, checksum FROM records WHERE kind = ? AND id = ?

-- name: has
SELECT 1 FROM records WHERE kind = ? AND id = ?

-- name: ids
SELECT id FROM records WHERE kind = ? ORDER BY rowid

-- name: rows
SELECT rowid, id, document, files, checksum FROM records WHERE kind = ? ORDER BY id

-- name: put
INSERT INTO records VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, id) DO UPDATE
SET document = excluded.document, files = excluded.files, checksum = excluded.checksum

-- name: insert
INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?)

-- name: remove
DELETE FROM records WHERE kind = ? AND id = ?

-- name: number
SELECT rowid FROM records WHERE kind = ? AND id = ?

-- name: copy_damaged
INSERT INTO damaged SELECT *, ? FROM records WHERE rowid = ?

-- name: remove_number
DELETE FROM records WHERE rowid = ?

-- name: count
SELECT count(*) FROM records WHERE kind = ?

-- name: usage
SELECT kind, records, bytes FROM usage

-- name: marks
SELECT kind, records, bytes, checksums FROM usage

-- name: checksums
SELECT id, checksum FROM records WHERE kind = ?

-- name: tallies
SELECT kind, usage.records, usage.checksums, count(id), coalesce(sum(checksum), 0)
FROM usage LEFT JOIN records USING (kind) GROUP BY kind

-- name: take_tally
UPDATE usage SET checksums = (SELECT coalesce(sum(checksum), 0) FROM records WHERE kind = ?1)
WHERE kind = ?1

-- name: last_number
SELECT coalesce(max(rowid), 0) FROM records

-- name: numbers
SELECT kind, id, document, files, checksum FROM records
WHERE rowid > ? AND rowid <= ? ORDER BY rowid
