"""The backend `aws`: virtual machines of Amazon EC2. Needs the extra `aws` (boto3)."""
