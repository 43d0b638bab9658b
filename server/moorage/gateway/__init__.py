"""The WebSocket front door: sessions, bounded outboxes, authentication."""
