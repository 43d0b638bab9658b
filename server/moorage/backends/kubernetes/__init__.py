"""Kubernetes: what a cluster has and what others use of it, kept up to date (`inventory`).

What can go wrong is one tree:

    KubernetesError              the cluster cannot be asked; the message says why
    ├── ConfigurationError       its kubeconfig cannot be read
    ├── NoAnswerError            its API server did not answer, or broke off
    └── RefusedError             its API server said no; `status` has its code
"""
