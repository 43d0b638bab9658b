"""The backend `kubernetes`: runs pods, and follows a cluster's capacity and use (`inventory`).

All errors are one tree:

    KubernetesError              the cluster does not answer a call; the message says why
    ├── ConfigurationError       its kubeconfig cannot be read
    ├── NoAnswerError            its API server did not answer, or cut the connection
    └── RefusedError             its API server refused the call; `status` has the code
"""
