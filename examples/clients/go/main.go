// Streams, cancels, sets a deadline and reads errors: go run . [HOST:PORT]
//
// TOKA_API_KEY: a key. TOKA_GRPC_CA: TLS; with TOKA_GRPC_CERT and TOKA_GRPC_KEY, mTLS. All three name PEM files.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/tokasaurus-client/scheduler"
)

//go:generate ./generate.sh

const (
	prompt   = "Question: Tom buys 3 books for $7 each and 4 pens for $2 each. How much does he pay?\nAnswer:"
	patience = time.Minute
)

// As google.rpc.Code and gRPC spell them.
var codeNames = map[codes.Code]string{
	codes.Canceled: "CANCELLED", codes.Unknown: "UNKNOWN", codes.InvalidArgument: "INVALID_ARGUMENT",
	codes.DeadlineExceeded: "DEADLINE_EXCEEDED", codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS",
	codes.PermissionDenied: "PERMISSION_DENIED", codes.ResourceExhausted: "RESOURCE_EXHAUSTED",
	codes.FailedPrecondition: "FAILED_PRECONDITION", codes.Unimplemented: "UNIMPLEMENTED", codes.Internal: "INTERNAL",
	codes.Unavailable: "UNAVAILABLE", codes.Unauthenticated: "UNAUTHENTICATED",
}

func main() {
	address := "127.0.0.1:10310"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if err := run(address); err != nil {
		report(os.Stderr, status.Convert(err))
		os.Exit(1)
	}
}

func run(address string) error {
	connection, err := connect(address)
	if err != nil {
		return err
	}
	defer connection.Close()
	client := scheduler.NewSchedulerServiceClient(connection)
	ctx := context.Background()
	if key := os.Getenv("TOKA_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	for _, part := range []func(context.Context, scheduler.SchedulerServiceClient) error{
		showModel, stream, cancel, deadline, beRefused,
	} {
		if err := part(ctx, client); err != nil {
			return err
		}
	}
	return nil
}

func connect(address string) (*grpc.ClientConn, error) {
	transport, err := security()
	if err != nil {
		return nil, err
	}
	return grpc.Dial(address, transport,
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
}

func security() (grpc.DialOption, error) {
	ca, cert, key := os.Getenv("TOKA_GRPC_CA"), os.Getenv("TOKA_GRPC_CERT"), os.Getenv("TOKA_GRPC_KEY")
	if ca == "" {
		return grpc.WithInsecure(), nil
	}
	pem, err := os.ReadFile(ca)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s: holds no certificate in PEM", ca)
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return grpc.WithTransportCredentials(credentials.NewTLS(config)), nil
}

func showModel(ctx context.Context, client scheduler.SchedulerServiceClient) error {
	ctx, done := context.WithTimeout(ctx, patience)
	defer done()
	answer, err := client.GetModel(ctx, &scheduler.GetModelRequest{})
	if err != nil {
		return err
	}
	model := answer.GetModel()
	fmt.Printf("model: %s, contract %s, %d tokens of context\n",
		model.GetId(), model.GetContractVersion(), model.GetMaxContextTokens())
	return nil
}

// generate passes every message of one call to see, until the end of the stream.
func generate(ctx context.Context, client scheduler.SchedulerServiceClient, request *scheduler.GenerateRequest,
	see func(*scheduler.GenerateResponse)) error {
	call, err := client.Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		message, err := call.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		see(message)
	}
}

// Text as it comes. The first message accepts the request; the last of a sample has its finish.
func stream(ctx context.Context, client scheduler.SchedulerServiceClient) error {
	ctx, done := context.WithTimeout(ctx, patience)
	defer done()
	request := &scheduler.GenerateRequest{
		Prompt:   &scheduler.GenerateRequest_Text{Text: prompt},
		Sampling: &scheduler.Sampling{Temperature: proto.Float32(0)},
		Stopping: &scheduler.Stopping{MaxTokens: proto.Uint32(100)},
	}
	return generate(ctx, client, request, func(message *scheduler.GenerateResponse) {
		if accepted := message.GetAccepted(); accepted != nil {
			fmt.Printf("accepted: %d prompt tokens\nanswer:", accepted.GetPromptTokens())
		}
		for _, sample := range message.GetOutputs().GetSamples() {
			fmt.Print(sample.GetText())
			if finish := sample.GetFinish(); finish != nil {
				fmt.Printf("\nfinish: %s, %d tokens\n", finish.GetReason(), finish.GetUsage().GetCompletionTokens())
				if finish.GetError() != nil {
					report(os.Stdout, status.FromProto(finish.GetError()))
				}
			}
		}
	})
}

func endless() *scheduler.GenerateRequest {
	return &scheduler.GenerateRequest{
		Prompt:   &scheduler.GenerateRequest_Text{Text: prompt},
		Stopping: &scheduler.Stopping{IgnoreEos: proto.Bool(true)},
	}
}

// Cancelling the context ends the request: its place in the batch goes to others at once.
func cancel(ctx context.Context, client scheduler.SchedulerServiceClient) error {
	ctx, stop := context.WithTimeout(ctx, patience)
	defer stop()
	tokens := 0
	err := generate(ctx, client, endless(), func(message *scheduler.GenerateResponse) {
		for _, sample := range message.GetOutputs().GetSamples() {
			tokens += len(sample.GetTokenIds())
		}
		if tokens >= 5 {
			stop()
		}
	})
	if status.Code(err) != codes.Canceled {
		return err
	}
	fmt.Println("cancelled: CANCELLED")
	return nil
}

// Client and server both watch the deadline: the sample ends with a finish, or the call with a status, or both.
func deadline(ctx context.Context, client scheduler.SchedulerServiceClient) error {
	ctx, done := context.WithTimeout(ctx, 500*time.Millisecond)
	defer done()
	ended := "never"
	err := generate(ctx, client, endless(), func(message *scheduler.GenerateResponse) {
		for _, sample := range message.GetOutputs().GetSamples() {
			if finish := sample.GetFinish(); finish != nil {
				ended = finish.GetReason().String()
			}
		}
	})
	if code := status.Code(err); code == codes.DeadlineExceeded {
		ended = codeNames[code]
	} else if err != nil {
		return err
	}
	fmt.Println("deadline:", ended)
	return nil
}

func beRefused(ctx context.Context, client scheduler.SchedulerServiceClient) error {
	ctx, done := context.WithTimeout(ctx, patience)
	defer done()
	request := &scheduler.GenerateRequest{
		Prompt:   &scheduler.GenerateRequest_Text{Text: prompt},
		Sampling: &scheduler.Sampling{TopP: proto.Float32(3)},
	}
	if err := generate(ctx, client, request, func(*scheduler.GenerateResponse) {}); err != nil {
		report(os.Stdout, status.Convert(err))
	}
	return nil
}

// report says what a failed call tells: a code, and details that say why, where, and when to come back.
func report(to io.Writer, failure *status.Status) {
	reason := "no reason"
	var more []string
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.GetReason()
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				more = append(more, "field: "+violation.GetField())
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay()
			milliseconds := delay.GetSeconds()*1000 + int64(delay.GetNanos())/1e6
			more = append(more, fmt.Sprintf("retry: after %d ms", milliseconds))
		}
	}
	fmt.Fprintf(to, "error: %s, %s\nmessage: %s\n", codeNames[failure.Code()], reason, failure.Message())
	for _, line := range more {
		fmt.Fprintln(to, line)
	}
}
