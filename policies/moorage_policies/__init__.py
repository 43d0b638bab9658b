"""The policies that ship with Moorage. Each file is one `AIOSv1PolicyRule`, readable on its own."""
